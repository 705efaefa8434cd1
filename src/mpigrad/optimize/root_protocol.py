"""What a root that thinks and the ranks that serve it tell each other."""

from __future__ import annotations

import contextlib
import math
import pickle
import time
import traceback
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpigrad.communicator import BlockingCall, Communicator
from mpigrad.guard import end_job

__all__ = ["agree", "evaluation", "parcel", "request", "unpacked"]

# Seconds that a rank which failed in an evaluation leaves to the others for ending theirs.
_PATIENCE = 5.0

# An exception on its way to another rank: itself where it can be sent, its rank and traceback.
Parcel = tuple[BaseException, int, str]


def request(
    message: NDArray[np.float64], root: int, comm: Communicator, *, first: bool = False
) -> NDArray[np.float64]:
    """Broadcast a request, or a further part of one, into `message` (collective).

    The `first` part comes when the root has thought for as long as it liked. The ranks that wait
    for it leave their processors to the root, and are no hang while it may still come.
    """
    if comm.size > 1:
        under_way = comm.mpi.Ibcast(message, root)
        serves = first and comm.rank != root
        with BlockingCall("the optimizer's next request", comm.slot, unlimited=serves):
            _complete(under_way)
    return message


def _complete(under_way: MPI.Request, seconds: float = math.inf) -> bool:
    """Wait without keeping a processor busy; false where it takes longer than that."""
    start = time.monotonic()
    while not under_way.Test():
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        time.sleep(min(waited / 10, 1e-3))
    return True


def agree(error: Exception | None, comm: Communicator) -> BaseException | None:
    """Of an evaluation's errors this rank's own, or that of the lowest rank that has one."""
    if comm.size == 1:
        return error
    mine, all_ranks = np.array([error is not None]), np.zeros(comm.size, bool)
    under_way = comm.mpi.Iallgather(mine, all_ranks)
    # The others may wait inside the objective for the rank that failed. To the watchdog it counts
    # as one that may still come: it ends the job itself, since it knows the cause.
    if error is not None and not _complete(under_way, _PATIENCE):
        world = MPI.COMM_WORLD
        end_job(
            "".join(traceback.format_exception(error))
            + f"mpigrad: rank {world.rank} of {world.size} failed in an evaluation of the "
            "objective, in which other ranks wait for it; ending all ranks"
        )
    with BlockingCall("the end of an evaluation", comm.slot):
        _complete(under_way)
    if not all_ranks.any():
        return None
    parcels = comm.mpi.allgather(None if error is None else parcel(error, comm))
    first = next(found for found in parcels if found is not None)
    return error or unpacked(first, "an evaluation of the objective failed")


@contextlib.contextmanager
def evaluation(comm: Communicator) -> Iterator[None]:
    """A block, perhaps with messages, whose error on any rank is raised by all of them.

    Where the others wait inside the block for a rank that has failed, the job ends.
    """
    error: BaseException | None = None
    try:
        yield
    except Exception as raised:
        error = agree(raised, comm)
    else:
        error = agree(None, comm)
    if error is not None:
        raise error


def parcel(error: BaseException, comm: Communicator) -> Parcel:
    """What is sent of an error."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return error, comm.rank, text


def unpacked(sent: Parcel, what: str) -> BaseException:
    """The error on the rank that was sent it, with its traceback."""
    error, rank, text = sent
    error.add_note(f"mpigrad: {what}, on rank {rank}:\n{text}")
    return error
