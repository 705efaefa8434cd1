"""What every strategy is: frozen settings that make runs."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from mpi4py import MPI

from mpigrad.collective_errors import gather_errors
from mpigrad.communicator import Communicator
from mpigrad.training.history import Record, Span
from mpigrad.training.replica import Batch, Replica

__all__ = [
    "END",
    "FAILED",
    "SAVE",
    "STOP",
    "Run",
    "Session",
    "StepError",
    "Strategy",
    "fail",
    "following",
    "joined",
]

# What a rank wishes: the callback has said to end; a save is due; somebody asked for the end; the
# callback has failed.
END, SAVE, STOP, FAILED = 1, 2, 4, 8


class StepError(RuntimeError):
    """Another rank has failed in this step; the message holds its rank, error and traceback."""


class Session(Protocol):
    """One call of `Trainer.run`, as strategies see it.

    Attributes
    ----------
    steps
        The number of the last update that is wanted; None: until the batches end.
    attentive
        Whether there is anything that `wishes` could tell on some rank (equal on all ranks).
    """

    steps: int | None

    @property
    def attentive(self) -> bool: ...

    def note(self, record: Record) -> None:
        """Keep a record, show progress, call the user's callback; on this rank alone."""
        ...

    def wishes(self) -> int:
        """What this rank wants after the latest record: bits `END`, `SAVE`, `STOP`, `FAILED`."""
        ...

    def act(self, wishes: int) -> bool:
        """Do what the bits, joined over ranks, say (collective); whether to end."""
        ...


class Run(abc.ABC):
    """A training that has begun on all ranks; `Strategy.start` makes it.

    Attributes
    ----------
    shard
        (index, count): which part of each global batch this rank takes; count is 0 on a rank that
        takes none.
    keeps_state
        Whether this rank's replica belongs into a save. Where only rank 0's does, all replicas go
        on from rank 0's.
    computed
        Whether this rank has computed a gradient. At the end, and in saves, all ranks have the
        buffers (running means, say) of the first one that has.
    step_number
        Updates so far.
    spans
        What this rank did in the latest step, where a run notes it.
    clock
        Seconds since the start of the training, for records; the trainer's.
    """

    shard: tuple[int, int]
    keeps_state: bool
    computed: bool = False
    step_number: int = 0
    spans: Sequence[Span] = ()
    clock: Callable[[], float] = staticmethod(time.monotonic)

    @abc.abstractmethod
    def train(self, batches: Iterator[Batch], session: Session) -> None:
        """Train until the batches end on all ranks, or the session ends it (collective).

        Ranks may have different numbers of batches. Each update is told to `session.note`.
        """

    def updates_of(self, batches: int) -> int:
        """How many updates so many global batches make at most."""
        return batches

    def step(self, batch: Batch) -> Record:
        """One update (collective)."""
        raise TypeError(f"{type(self).__name__}: ranks do not go step by step; use Trainer.run")

    def state(self) -> Any:
        """What the run itself has to remember, beside the replica (JSON); rank 0's is saved."""
        return None

    def load(self, state: Any) -> None:  # noqa: B027 (nothing to do)
        """Go on from what `state` has given (collective)."""


class Strategy(abc.ABC):
    """How ranks train one model together: a frozen dataclass of settings."""

    @abc.abstractmethod
    def start(self, replica: Replica, comm: Communicator) -> Run:
        """Begin on all ranks (collective). Replicas have been made equal."""


def joined(comm: Communicator, wishes: int) -> int:
    """What any rank wishes (collective)."""
    return int(comm.mpi.allreduce(wishes, op=MPI.BOR))


def following(batches: Iterator[Batch]) -> Batch | Exception | None:
    """The next batch; None where there is none, or the error of getting it."""
    try:
        return next(batches, None)
    except Exception as error:  # to be raised by all ranks together
        return error


def fail(comm: Communicator, error: Exception | None) -> None:
    """Raise on all ranks, where one of them has an error (collective).

    Raises
    ------
    Exception
        A rank's own error.
    StepError
        Where a rank has none: what the others' are.
    """
    found = gather_errors(comm, error)
    if error is not None:
        raise error
    if found:
        first, *more = found
        others = "".join(f"; rank {e.rank} too: {e.kind}: {e.text}" for e in more)
        raise StepError(
            f"rank {first.rank} of {comm.size} has failed: {first.kind}: {first.text}{others}\n"
            f"{first.traceback}"
        )
