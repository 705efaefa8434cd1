"""Messages between a root that runs an optimizer and the worker ranks that evaluate for it."""

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

__all__ = ["first_error", "pack_error", "request", "shared_evaluation", "unpack_error"]

# A rank that failed in an evaluation waits so many seconds for the others to end theirs.
_PATIENCE = 5.0

# An exception for another rank: the exception if it can be pickled, its rank, its traceback.
ErrorMessage = tuple[BaseException, int, str]


def request(
    message: NDArray[np.float64], root: int, comm: Communicator, *, first: bool = False
) -> NDArray[np.float64]:
    """Broadcast a request, or a further part of one, into `message` (collective).

    The root may compute for any time before it sends the `first` part. Workers that wait for it
    leave their processors to the root. The watchdog does not count this waiting as a hang, as long
    as the root can still send.
    """
    if comm.size > 1:
        under_way = comm.mpi.Ibcast(message, root)
        serves = first and comm.rank != root
        with BlockingCall("the optimizer's next request", comm.slot, unlimited=serves):
            _complete(under_way)
    return message


def _complete(under_way: MPI.Request, seconds: float = math.inf) -> bool:
    """Wait without keeping a processor busy. Return False if it takes longer than `seconds`."""
    start = time.monotonic()
    while not under_way.Test():
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        time.sleep(min(waited / 10, 1e-3))
    return True


def first_error(error: Exception | None, comm: Communicator) -> BaseException | None:
    """Return this rank's error of an evaluation, or the error of the lowest rank (collective)."""
    if comm.size == 1:
        return error
    failed, all_ranks = np.array([error is not None]), np.zeros(comm.size, bool)
    under_way = comm.mpi.Iallgather(failed, all_ranks)
    # The others may wait inside the objective for the rank that failed. The watchdog sees no
    # deadlock, so this rank, which knows the cause, ends the job.
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
    messages = comm.mpi.allgather(None if error is None else pack_error(error, comm))
    first = next(message for message in messages if message is not None)
    return error or unpack_error(first, "an evaluation of the objective failed")


@contextlib.contextmanager
def shared_evaluation(comm: Communicator) -> Iterator[None]:
    """Raise an error of this block on all ranks. The block may send messages (collective).

    If other ranks wait inside the block for a rank that has failed, the job ends.
    """
    error: BaseException | None = None
    try:
        yield
    except Exception as raised:
        error = first_error(raised, comm)
    else:
        error = first_error(None, comm)
    if error is not None:
        raise error


def pack_error(error: BaseException, comm: Communicator) -> ErrorMessage:
    """Return an error in a form that can be sent."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return error, comm.rank, text


def unpack_error(message: ErrorMessage, what: str) -> BaseException:
    """Return an error received from another rank, with its traceback as a note."""
    error, rank, text = message
    error.add_note(f"mpigrad: {what}, on rank {rank}:\n{text}")
    return error
