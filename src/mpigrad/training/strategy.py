"""What every strategy is: frozen settings that make runs."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.training.history import Record
from mpigrad.training.replica import Batch, Replica

__all__ = ["LockStep", "Run", "Session", "StepError", "Strategy"]


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
    attentive: bool

    def seconds(self) -> float:
        """Since the start of the training, for a record."""
        ...

    def note(self, record: Record) -> None:
        """Keep a record, show progress, call the user's callback; on this rank alone."""
        ...

    def wishes(self) -> int:
        """Bits of what this rank wants after the latest record (1 end, 2 save, 4 save and end)."""
        ...

    def act(self, wishes: int) -> bool:
        """Save where the bits, joined over ranks, say so (collective); whether to end."""
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
    step_number
        Updates so far.
    """

    shard: tuple[int, int]
    keeps_state: bool
    step_number: int = 0

    @abc.abstractmethod
    def train(self, batches: Iterator[Batch], session: Session) -> None:
        """Train until the batches end on all ranks, or the session ends it (collective).

        Ranks may have different numbers of batches. Each update is told to `session.note`.
        """

    def step(self, batch: Batch, seconds: Callable[[], float]) -> Record:
        """One update (collective)."""
        raise TypeError(f"{type(self).__name__}: ranks do not go step by step; use Trainer.run")

    def state(self) -> Any:
        """What the run itself has to remember, beside the replica (JSON); rank 0's is saved."""
        return None

    def load(self, state: Any) -> None:
        """Go on from what `state` has given; on every rank."""


class Strategy(abc.ABC):
    """How ranks train one model together: a frozen dataclass of settings."""

    @abc.abstractmethod
    def start(self, replica: Replica, comm: Communicator) -> Run:
        """Begin on all ranks (collective). Replicas have been made equal."""


class LockStep(Run):
    """A run in which all ranks make each step together: a strategy writes `update`."""

    def __init__(self, replica: Replica, comm: Communicator) -> None:
        self.replica, self.comm = replica, comm
        self.shard = comm.rank, comm.size

    @abc.abstractmethod
    def update(self, batch: Batch | Exception | None) -> Record | None:
        """One update; None, on all ranks, where no rank has a batch left.

        `batch` is None where this rank's batches have ended, an exception where getting the next
        one has failed.
        """

    def train(self, batches: Iterator[Batch], session: Session) -> None:
        raise NotImplementedError
        # while True: record = self.update(next batch); session.note(record); wishes; act

    def joined(self, wishes: int) -> int:
        """What any rank wishes."""
        return int(self.comm.mpi.allreduce(wishes, op=MPI.BOR))
