"""The startup barrier: end the job if a rank does not import mpigrad."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpi4py import MPI

__all__ = ["await_all_ranks"]

# After the time limit, ranks have _HELLO seconds to tell rank 0 that they are here. Each rank then
# waits _STAGGER seconds longer than the rank before it, so that the cause is printed once.
_HELLO, _STAGGER = 3.0, 2.0  # ending a job takes a second on a busy machine
_PAUSE = (
    1e-3  # first pause between two tests, in seconds (pauses grow, to leave the cores to others)
)


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
                end_job(_text(world, _absent(world, tag), seconds + over))
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


def _text(world: MPI.Intracomm, absent: list[int], waited: float) -> str:
    listed = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    who = f"rank{'s' * (len(absent) > 1)} {listed}" if absent else "another rank"
    verb = "have" if len(absent) > 1 else "has"
    return (
        f"mpigrad: rank {world.rank} of {world.size} has waited {waited:.0f} s in `import "
        f"mpigrad`: {who} {verb} not imported it, or {verb} already ended. Import mpigrad on every "
        "rank, at the top of the program. If that takes longer, set MPIGRAD_TIMEOUT (seconds, 0: "
        "no limit)."
    )
