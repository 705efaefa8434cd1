"""All ranks import mpigrad: those that do not come end the job, where MPI would wait for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpi4py import MPI

__all__ = ["await_all"]

# After the time limit: seconds in which ranks tell rank 0 that they are here, and those that a rank
# waits for all before it to speak, so that the cause is said once.
_HELLO, _TURN = 3.0, 2.0  # to end a job takes a second where the machine is busy
_PAUSE = 1e-3  # between two looks; longer and longer, as a machine may be full of waiting ranks


def await_all(seconds: float, end_job: Callable[[str], None]) -> None:
    """Wait until every rank of the world is here (collective over all ranks).

    Parameters
    ----------
    seconds
        The time limit; 0: none.
    end_job
        Called with who is absent (rank 0 knows), when the time is over; it does not return.
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
            if over > _HELLO + _TURN * min(world.rank, 15):
                end_job(_text(world, _absent(world, tag), seconds + over))
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)
    # At the last moment all have come: the hellos that were sent are received.
    were_late = world.allgather(late)
    for rank in [r for r in range(1, world.size) if were_late[r] and world.rank == 0]:
        world.Recv([bytearray(1), MPI.BYTE], rank, tag)
    hello.Wait()


def _absent(world: MPI.Intracomm, tag: int) -> list[int]:
    """On rank 0, the ranks that have sent no hello."""
    heard = {r for r in range(1, world.size) if world.rank == 0 and world.Iprobe(r, tag)}
    return [r for r in range(1, world.size) if r not in heard] if world.rank == 0 else []


def _text(world: MPI.Intracomm, absent: list[int], waited: float) -> str:
    shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    who = f"rank{'s' * (len(absent) > 1)} {shown}" if absent else "another rank"
    return (
        f"mpigrad: rank {world.rank} of {world.size} has waited {waited:.0f} s in `import "
        f"mpigrad`: {who} has not imported it, or has ended before. Import mpigrad on every rank, "
        "at the top of the program; where that takes longer, set MPIGRAD_TIMEOUT (seconds, 0: no "
        "limit)."
    )
