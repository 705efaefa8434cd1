"""All ranks end: those that do not come are named, where MPI_Finalize would wait in silence."""

from __future__ import annotations

import math
import os
import pathlib
import sys
import time
from collections.abc import Callable

from mpi4py import MPI

from mpigrad.guard import board as b
from mpigrad.guard.watchdog import gone, where

__all__ = ["await_ends"]

_PAUSE = 1e-3  # between two looks; longer and longer
_IDLE = 0.02  # of a processor's time: who takes less computes nothing
_TICKS = os.sysconf("SC_CLK_TCK")


def await_ends(
    board: b.Board, world: MPI.Intracomm, seconds: float, end_job: Callable[[str], None]
) -> None:
    """Wait until every rank has come to its end (collective over `world`).

    A rank may well compute, or write, when the others are done: after the time limit the ranks of
    this host that have not come are named, and the job is ended only where all of them wait for
    threads of their own, and have done nothing in all that time, or have died.

    Parameters
    ----------
    seconds
        The time limit; 0: none.
    end_job
        Called with what there is to say; it does not return.
    """
    everybody, pause = world.Ibarrier(), _PAUSE
    waited, passed, before = 0.0, 0.0, _work(board)
    last, named = time.monotonic(), False
    while not everybody.Test():
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)
        # A job that is suspended for hours has not waited for hours.
        last, step = (now := time.monotonic()), min(now - last, 1.0)
        waited, passed = waited + step, passed + step
        if not seconds or passed < seconds:
            continue
        missing, done = _work(board), passed
        passed, before, earlier = 0.0, missing, before
        ended = [r for r in range(len(board.ranks)) if _has_ended(board, r)]
        if not missing or board.mine != min(ended):  # one of those that wait says it
            continue
        dead = any(gone(board, r) for r in missing)
        # Not finite: at work, as far as is known.
        idle = all(missing[r] - earlier.get(r, math.nan) < _IDLE * done for r in missing)
        if dead or (idle and all(board.slots[r]["line_waits"] for r in missing)):
            end_job(_text(board, waited, seconds, _DEAD if dead else _ENDED))
        if not named:
            print(_text(board, waited, seconds, _GOES_ON), file=sys.stderr, flush=True)
        named = True


_ENDED = (
    "Those that have not ended compute nothing, and wait for threads of their own: look for one "
    "that never ends. Ending all ranks."
)
_DEAD = "A rank has died without a word of the launcher. Ending all ranks."
_GOES_ON = (
    "The job goes on, as those that have not ended may have work to do. If one of them waits in a "
    "call of mpi4py, or computes for ever, end the job yourself."
)


def _has_ended(board: b.Board, r: int) -> bool:
    return int(board.slots[r]["state"]) == b.ENDED


def _work(board: b.Board) -> dict[int, float]:
    """Seconds for which ranks of this host that have not ended have computed, by slot."""
    here = [r for r in range(len(board.ranks)) if not _has_ended(board, r)]
    return {r: _seconds(board, r) for r in here}


def _seconds(board: b.Board, r: int) -> float:
    """What a process has computed, with those that it has started; NaN where nobody can say."""
    slot = board.slots[r]
    process = pathlib.Path(f"/proc/{int(slot['pid'])}")
    if int(slot["namespace"]) != int(board.slots[board.mine]["namespace"]):
        return math.nan
    try:
        if any((task / "children").read_text().split() for task in (process / "task").iterdir()):
            return math.nan
        state, *fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    # "D": it waits for a disk or a file server.
    return math.nan if state == "D" else sum(int(n) for n in fields[10:14]) / _TICKS


def _text(board: b.Board, waited: float, seconds: float, remedy: str) -> str:
    lines = "\n".join(where(board))
    return (
        f"mpigrad: the program has ended on some ranks, which wait for the others since "
        f"{waited:.0f} s (MPIGRAD_TIMEOUT={seconds:g}):\n{lines}\n{remedy}"
    )
