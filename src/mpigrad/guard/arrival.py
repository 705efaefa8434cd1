"""All ranks import mpigrad: those that do not come are named, where MPI would wait for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpi4py import MPI

__all__ = ["await_all"]

_MARGIN = 5.0  # seconds: rank 0, which knows who is absent, speaks first
_PAUSE = 1e-3  # between two looks; longer and longer, as a machine may be full of waiting ranks


def await_all(seconds: float, end_job: Callable[[str], None]) -> None:
    """Wait until every rank of the world is here (collective over all ranks).

    Parameters
    ----------
    seconds
        The time limit; 0: none.
    end_job
        Called with who is absent, when the time is over; it does not return.
    """
    world = MPI.COMM_WORLD
    tag = (world.Get_attr(MPI.TAG_UB) or 32767) - 1
    start, pause = time.monotonic(), _PAUSE
    hellos = [bytearray(1) for _ in range(world.size)]
    absent: dict[int, MPI.Request] = {}
    sent = MPI.REQUEST_NULL
    if world.rank == 0:
        absent = {r: world.Irecv([hellos[r], MPI.BYTE], r, tag) for r in range(1, world.size)}
    else:
        sent = world.Isend([hellos[world.rank], MPI.BYTE], 0, tag)
    everybody = MPI.REQUEST_NULL if absent else world.Ibarrier()
    while True:
        if absent:
            absent = {r: hello for r, hello in absent.items() if not hello.Test()}
            if not absent:
                everybody = world.Ibarrier()
        elif everybody.Test() and sent.Test():
            return
        waited = time.monotonic() - start
        if seconds and waited > seconds + (0.0 if world.rank == 0 else _MARGIN):
            end_job(_text(world, sorted(absent), waited))
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)


def _text(world: MPI.Intracomm, absent: list[int], waited: float) -> str:
    shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    who = f"rank{'s' * (len(absent) > 1)} {shown}" if absent else "another rank"
    return (
        f"mpigrad: rank {world.rank} of {world.size} has waited {waited:.0f} s in `import "
        f"mpigrad`: {who} has not imported it, or has ended before. Import mpigrad on every rank, "
        "at the top of the program; where that takes longer, set MPIGRAD_TIMEOUT (seconds, 0: no "
        "limit)."
    )
