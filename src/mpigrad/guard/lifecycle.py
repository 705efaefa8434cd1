"""The start and end of a job: ranks that do not come, messages left over, ranks that do not end."""

from __future__ import annotations

import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpigrad.guard import board as b
from mpigrad.guard.board_reader import Reader, decode, layout
from mpigrad.guard.watchdog import end_reason, rank_states, stop_note

__all__ = [
    "await_all_ends",
    "await_all_ranks",
    "unreceived_report",
]

# ---- The startup barrier: end the job if a rank does not import mpigrad ----


# After the time limit, ranks have _HELLO seconds to tell rank 0 that they are here. Each rank then
# waits _STAGGER seconds longer than the rank before it, so that the cause is printed once.
_HELLO, _STAGGER = 3.0, 2.0  # ending a job takes a second on a busy machine
_PAUSE = 1e-3  # first pause between two tests, in seconds; pauses grow


def await_all_ranks(seconds: float, end_job: Callable[[str], None]) -> None:
    """Wait until every rank of the world has arrived (collective over all ranks).

    Parameters
    ----------
    seconds
        The time limit (0: unlimited).
    end_job
        Called after the time limit, with a text that names the absent ranks (if this is rank 0).
        It does not return.
    """
    world = MPI.COMM_WORLD
    tag = (world.Get_attr(MPI.TAG_UB) or 32767) - 1
    start, pause = time.monotonic(), _PAUSE
    hello = MPI.REQUEST_NULL
    everybody, late = world.Ibarrier(), False
    while not everybody.Test():
        over = time.monotonic() - start - seconds
        if seconds and over > 0:
            if not late and world.rank > 0:
                hello = world.Isend([bytearray(1), MPI.BYTE], 0, tag)
            late = True
            if over > _HELLO + _STAGGER * min(world.rank, 15):
                end_job(_absence_text(world, _absent(world, tag), seconds + over))
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)
    # All ranks came after all: receive the hellos that were sent.
    were_late = world.allgather(late)
    for rank in [r for r in range(1, world.size) if were_late[r] and world.rank == 0]:
        world.Recv([bytearray(1), MPI.BYTE], rank, tag)
    hello.Wait()


def _absent(world: MPI.Intracomm, tag: int) -> list[int]:
    """Return, on rank 0, the ranks that have sent no hello."""
    heard = {r for r in range(1, world.size) if world.rank == 0 and world.Iprobe(r, tag)}
    return [r for r in range(1, world.size) if r not in heard] if world.rank == 0 else []


def _absence_text(world: MPI.Intracomm, absent: list[int], waited: float) -> str:
    listed = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    who = f"rank{'s' * (len(absent) > 1)} {listed}" if absent else "another rank"
    verb = "have" if len(absent) > 1 else "has"
    return (
        f"mpigrad: rank {world.rank} of {world.size} has waited {waited:.0f} s in `import "
        f"mpigrad`: {who} {verb} not imported it, or {verb} already ended. Import mpigrad on every "
        "rank, at the top of the program. If that takes longer, set MPIGRAD_TIMEOUT (seconds, 0: "
        "no limit)."
    )


# ---- Find messages that were never received, at the end of a program ----


def unreceived_report(slots: Any) -> str:
    """Return the error about messages that were sent but never received, or "".

    MPI does not report a short message that is left over. If a receive of the same tag was meant
    for it, every later message was received one receive too early. After an operation that failed
    (and whose error the program caught) the result is "".
    """
    if slots["failure_seen"].any():
        return ""
    reader, lines = Reader(slots), []
    for r, slot in enumerate(slots):
        channels = slot["channels"]
        for channel in channels[(channels["id"] != 0) & (channels["sent"] > 0)]:
            identity, tag = int(channel["id"]), int(channel["tag"])
            members = reader.members(identity)
            receiver = members.get(int(channel["peer"]))
            sender = next((m.rank for m in members.values() if m.slot == r), None)
            if receiver is None or sender is None or reader.counts_unknown(receiver):
                continue  # on another host, of a freed communicator, or not counted
            taken = reader.channel(receiver.slot, identity, sender, tag)
            received = 0 if taken is None else int(taken["posted"])
            if left := max(0, int(channel["sent"]) - received):
                message = reader.message(r, identity, receiver.rank, tag, received + 1)
                to = f"to rank {reader.world(receiver.slot)}{reader.tag(receiver.entry, tag)}"
                text = f"{left} message{'s' * (left > 1)} {to}"
                if message is not None:
                    site = reader.site(r, int(message["site"]))
                    first = f"{layout(message['part'])} by {decode(message['operation'])} at {site}"
                    text += f", {'the first is ' * (left > 1)}{first}"
                lines.append(f"  rank {reader.world(r)}: {text}")
    if not lines:
        return ""
    return "\n".join([
        "mpigrad: messages were sent but never received:",
        *lines,
        "Receive each of these messages on its destination rank, with the tag of its send. If "
        "jax.grad, jvp, vjp or vmap sent it, use mpigrad's version of that function. If the "
        "program means to leave it, set MPIGRAD_UNRECEIVED=warn.",
    ])  # fmt: skip


# ---- The shutdown barrier: name the ranks that do not end, before MPI_Finalize waits for them


_IDLE = 0.02  # share of a processor below which a process counts as idle
_TICKS = os.sysconf("SC_CLK_TCK")


def await_all_ends(
    board: b.Board, world: MPI.Intracomm, seconds: float, end_job: Callable[[str], None]
) -> None:
    """Wait until every rank has ended its program (collective over `world`).

    A rank may still compute or write when the others are done. After the time limit, the ranks of
    this host that have not ended are named. The job is ended only if one of them has died, if the
    process of one is stopped then and one limit later, or if all of them wait for threads of their
    own and used no processor time since.

    Parameters
    ----------
    seconds
        The time limit (0: unlimited).
    end_job
        Called with the error text. It does not return.
    """
    everybody, pause = world.Ibarrier(), _PAUSE
    waited, passed, before = 0.0, 0.0, _work(board)
    last, named = time.monotonic(), False
    halted: set[int] = set()
    while not everybody.Test():
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)
        # The time for which a job is suspended does not count.
        last, step = (now := time.monotonic()), min(now - last, 1.0)
        waited, passed = waited + step, passed + step
        if not seconds or passed < seconds:
            continue
        missing, done = _work(board), passed
        passed, before, earlier = 0.0, missing, before
        ended = [r for r in range(len(board.ranks)) if _has_ended(board, r)]
        if not missing or board.own_index != min(ended):  # one waiting rank reports for all
            continue
        dead = any(end_reason(board, r) for r in missing)
        # NaN: unknown, so the rank may be working.
        idle = all(missing[r] - earlier.get(r, math.nan) < _IDLE * done for r in missing)
        if dead or (idle and all(board.slots[r]["line_waits"] for r in missing)):
            end_job(_text(board, waited, seconds, _DEAD if dead else _ENDED))
        before_halted, halted = halted, {r for r in missing if stop_note(board, r)}
        if halted & before_halted:
            end_job(_text(board, waited, seconds, _STOPPED))
        if not named:
            print(_text(board, waited, seconds, _GOES_ON), file=sys.stderr, flush=True)
        named = True


_ENDED = (
    "Ending all ranks: those that have not ended use no processor time and wait for threads of "
    "their own. Find the thread that never ends."
)
_DEAD = (
    "Ending all ranks: a rank has died. Look for the cause in its output and in the kernel's log."
)
_STOPPED = (
    "Ending all ranks: the process of a rank is stopped. Let it go on earlier (kill -CONT), or "
    "start the job again."
)
_GOES_ON = (
    "The job goes on, because the other ranks may still have work to do. If one of them waits in a "
    "call of mpi4py or never stops computing, end the job yourself."
)


def _has_ended(board: b.Board, r: int) -> bool:
    return int(board.slots[r]["state"]) == b.ENDED


def _work(board: b.Board) -> dict[int, float]:
    """Return the processor time, in seconds, of each rank of this host that has not ended."""
    here = [r for r in range(len(board.ranks)) if not _has_ended(board, r)]
    return {r: _seconds(board, r) for r in here}


def _seconds(board: b.Board, r: int) -> float:
    """Return the processor time of a rank in seconds (NaN: unknown, or it has child processes)."""
    slot = board.slots[r]
    process = pathlib.Path(f"/proc/{int(slot['pid'])}")
    if int(slot["namespace"]) != int(board.slots[board.own_index]["namespace"]):
        return math.nan
    try:
        if any((task / "children").read_text().split() for task in (process / "task").iterdir()):
            return math.nan
        state, *fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return math.nan
    # "D": the process waits for a disk or a file server.
    return math.nan if state == b"D" else sum(int(n) for n in fields[10:14]) / _TICKS


def _text(board: b.Board, waited: float, seconds: float, remedy: str) -> str:
    lines = "\n".join(rank_states(board))
    return (
        f"mpigrad: the program has ended on some ranks, which have waited {waited:.0f} s for the "
        f"others (MPIGRAD_TIMEOUT={seconds:g}):\n{lines}\n{remedy}"
    )
