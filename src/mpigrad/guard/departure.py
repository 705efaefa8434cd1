"""All ranks end: those that do not come are named, where MPI_Finalize would wait in silence."""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Callable

from mpi4py import MPI

from mpigrad import board as b
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
    this host that have not come are named, and the job is ended only where none of them has done
    anything in all that time.

    Parameters
    ----------
    seconds
        The time limit; 0: none.
    end_job
        Called with what there is to say; it does not return.
    """
    everybody, start, pause = world.Ibarrier(), time.monotonic(), _PAUSE
    since, before = start, _work(board)
    named = False
    while not everybody.Test():
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)
        now = time.monotonic()
        if not seconds or now - since < seconds:
            continue
        work, passed = _work(board), now - since
        since, before, earlier = now, work, before
        ended = [r for r in range(len(board.ranks)) if r not in work]
        if not work or board.mine != min(ended):  # one of those that wait says it
            continue
        idle = all(work[r] - earlier.get(r, float("-inf")) < _IDLE * passed for r in work)
        if idle:
            end_job(_text(board, now - start, seconds, _ENDED))
        if not named:
            print(_text(board, now - start, seconds, _GOES_ON), file=sys.stderr, flush=True)
        named = True


_ENDED = (
    "Those that have not ended compute nothing: look at the line where they are, at threads that "
    "never end and at functions given to atexit. Ending all ranks."
)
_GOES_ON = (
    "The job goes on, as those that have not ended compute, or have started a process. If one of "
    "them waits in a call of mpi4py, or computes for ever, end the job yourself."
)


def _work(board: b.Board) -> dict[int, float]:
    """Seconds for which ranks of this host that have not ended have computed, by slot."""
    slots = range(len(board.ranks))
    here = [r for r in slots if int(board.slots[r]["state"]) != b.ENDED and not gone(board, r)]
    return {r: _seconds(int(board.slots[r]["pid"])) for r in here}


def _seconds(pid: int) -> float:
    """What a process has computed; infinity where it has started another, or cannot be seen."""
    process = pathlib.Path(f"/proc/{pid}")
    try:
        if any((task / "children").read_text().split() for task in (process / "task").iterdir()):
            return float("inf")
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _text(board: b.Board, waited: float, seconds: float, remedy: str) -> str:
    lines = "\n".join(where(board))
    return (
        f"mpigrad: the program has ended on some ranks, which wait for the others since "
        f"{waited:.0f} s (MPIGRAD_TIMEOUT={seconds:g}):\n{lines}\n{remedy}"
    )
