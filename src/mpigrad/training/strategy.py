"""The interface of strategies, and the contents of a save of a training."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpigrad.collective_errors import gather_errors, raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.training.history import Span, StepRecord
from mpigrad.training.replica import Batch, Replica, bcast_bytes

__all__ = [
    "END",
    "FAILED",
    "LAYOUT",
    "SAVE",
    "STOP",
    "Run",
    "Session",
    "StepError",
    "Strategy",
    "check",
    "combined_wishes",
    "local_parts",
    "metadata",
    "next_batch",
    "raise_step_error",
    "rank_parts",
    "restore",
    "unwrap",
]

# ---- The interface of strategies: frozen settings that make runs ----


# Bits of a rank's wishes: the callback returned True, a save is due, a signal asked for the end,
# the callback failed.
END, SAVE, STOP, FAILED = 1, 2, 4, 8


class StepError(RuntimeError):
    """Another rank failed in this step. The text has its rank, error and traceback."""


class Session(Protocol):
    """The interface of strategies to one call of `Trainer.run`.

    Attributes
    ----------
    steps
        The index of the last update, or None to train until the batches end.
    attentive
        True if `wishes` may be nonzero on some rank. It is the same on all ranks.

    Examples
    --------
    A session that ends the training after a loss below 0.1, without saves:

    >>> from mpigrad import training
    >>> class Quiet:
    ...     steps, attentive, last = None, True, None
    ...     def note(self, record):
    ...         self.last = record
    ...     def wishes(self):
    ...         return int(self.last is not None and self.last.loss < 0.1)
    ...     def act(self, wishes):
    ...         return wishes > 0
    >>> session: training.Session = Quiet()
    >>> session.note(training.StepRecord(step=1, loss=0.05, samples=8.0, seconds=0.1))
    >>> session.act(session.wishes())
    True
    """

    steps: int | None

    @property
    def attentive(self) -> bool: ...

    def note(self, record: StepRecord) -> None:
        """Store a record, show progress and call the user's callback, on this rank only."""
        ...

    def wishes(self) -> int:
        """Return this rank's wishes after the last record: bits END, SAVE, STOP, FAILED."""
        ...

    def act(self, wishes: int) -> bool:
        """Act on the combined bits of all ranks (collective), and return True to end."""
        ...


class Run(abc.ABC):
    """A training that has started on all ranks, made by `Strategy.start`.

    Attributes
    ----------
    shard
        (index, count): this rank takes part `index` of `count` parts of each global batch. The
        count is 0 on a rank that takes no samples.
    keeps_state
        True if a save includes this rank's replica. If a save has only rank 0's replica, all ranks
        load that one.
    computed
        True if this rank has computed a gradient. At the end, and in saves, all ranks get the
        buffers (such as running means) of the first such rank.
    step_number
        Count of updates so far.
    spans
        The activities of this rank in the last step, if the run records them.
    clock
        A function that returns seconds since the start of the training, set by the trainer.

    Examples
    --------
    >>> from mpigrad import default_communicator, training
    >>> class Nothing(training.Run):
    ...     shard, keeps_state = (0, 0), False
    ...     def train(self, batches, session):
    ...         self.step_number += len(list(batches))
    >>> run = Nothing()
    >>> run.train(iter([(1.0,), (2.0,)]), None)
    >>> run.step_number
    2
    """

    shard: tuple[int, int]
    keeps_state: bool
    computed: bool = False
    step_number: int = 0
    spans: Sequence[Span] = ()
    clock: Callable[[], float] = staticmethod(time.monotonic)

    @abc.abstractmethod
    def train(self, batches: Iterator[Batch], session: Session) -> None:
        """Train until the batches end on all ranks, or the session ends (collective).

        The counts of batches may differ between ranks. Each update is reported to `session.note`.
        """

    def updates_of(self, batches: int) -> int:
        """Return the largest count of updates that a count of global batches can make."""
        return batches

    def step(self, batch: Batch) -> StepRecord:
        """Make one update (collective)."""
        raise TypeError(
            f"Trainer.step: the ranks of {type(self).__name__} do not step together. Use "
            "Trainer.run."
        )

    def state(self) -> Any:
        """Return the run's state besides the replica as JSON data; a save has rank 0's."""
        return None

    def load(self, state: Any) -> None:  # noqa: B027 (nothing to do)
        """Load a state that `state` returned (collective)."""


class Strategy(abc.ABC):
    """The settings of a way to train one model on all ranks, a frozen dataclass.

    Examples
    --------
    >>> from mpigrad import training
    >>> isinstance(training.LocalSGD(every=4), training.Strategy)
    True
    """

    @abc.abstractmethod
    def start(self, replica: Replica, comm: Communicator) -> Run:
        """Start a run on all ranks (collective), whose replicas are already synchronized."""


def combined_wishes(comm: Communicator, wishes: int) -> int:
    """Return the union of the wishes of all ranks (collective)."""
    return int(comm.mpi.allreduce(wishes, op=MPI.BOR))


def next_batch(batches: Iterator[Batch]) -> Batch | Exception | None:
    """Return the next batch, or None at the end, or the error of the iterator."""
    try:
        return next(batches, None)
    except Exception as error:  # which all ranks raise together later
        return error


def raise_step_error(comm: Communicator, error: Exception | None) -> None:
    """Raise an error on all ranks if one of them has an error (collective).

    Raises
    ------
    Exception
        The rank's own error, if it has one.
    StepError
        The errors of the other ranks, on a rank without an error.
    """
    errors = gather_errors(comm, error)
    if error is not None:
        raise error
    if errors:
        first, *more = errors
        others = "".join(f"; rank {e.rank} too: {e.kind}: {e.text}" for e in more)
        raise StepError(
            f"trainer: rank {first.rank} of {comm.size} has failed: {first.kind}: {first.text}"
            f"{others}. Correct the error there:\n{first.traceback}"
        )


# ---- The contents of a save of a training, written and restored ----


Bytes = NDArray[np.uint8]
Tree = dict[str, Bytes]

LAYOUT = True  # the layout of every leaf: the bytes of all ranks, concatenated
_LEAVES = ("replica", "random", "batches")


def rank_parts(replica: Replica, run: Run, position: dict[str, Any] | None) -> Tree:
    """Return this rank's part of a save, with the position of its batches."""
    parts = {
        "replica": replica.state() if run.keeps_state else b"",
        "random": replica.random_state(),
        "batches": json.dumps(position).encode(),
    }
    return {name: np.frombuffer(part, np.uint8) for name, part in parts.items()}


def metadata(
    parts: Tree, replica: Replica, run: Run, comm: Communicator, strategy: str, records: Any
) -> dict[str, Any]:
    """Return the metadata of a save (collective): model, strategy, history and sizes of parts."""
    state: Any = None
    with raise_on_all_ranks(comm):
        state = run.state()
    sizes = comm.mpi.allgather([parts[name].size for name in _LEAVES])
    return {
        "training": 1,
        "strategy": strategy,
        "sizes": dict(zip(_LEAVES, zip(*sizes, strict=True), strict=True)),
        "parameters": [str(parameter) for parameter in replica.parameters],
        "records": [dataclasses.astuple(record) for record in records],
        "step": run.step_number,
        "run": state,
    }


def unwrap(extra: Any) -> Any:
    """Return the metadata of a save, also if a `Checkpoint` wrapped them."""
    return extra["extra"] if isinstance(extra, dict) and "about" in extra else extra


def check(extra: Any, replica: Replica, strategy: str, where: Any) -> None:
    """Raise a ValueError unless a save belongs to this model and this strategy."""
    if not (isinstance(extra, dict) and "training" in extra):
        raise ValueError(
            f"trainer: {where} is not a save of a training. Pass a directory that Trainer.save "
            "wrote."
        )
    if extra["strategy"] != strategy:
        raise ValueError(
            f"trainer: {where} is a save of a training by {extra['strategy']}, but this trainer "
            f"uses {strategy}. Use the strategy of the save."
        )
    here = [str(parameter) for parameter in replica.parameters]
    for a, b in zip(extra["parameters"], here, strict=False):
        if a != b:
            raise ValueError(
                f"trainer: {where} is a save of another model: it has {a}, this model has {b}. "
                "Build the saved model."
            )
    if len(extra["parameters"]) != len(here):
        raise ValueError(
            f"trainer: {where} is a save of another model: it has {len(extra['parameters'])} "
            f"parameters, this model has {len(here)}. Build the saved model."
        )


def local_parts(extra: Any, comm: Communicator) -> Tree:
    """Return empty arrays for the parts that this rank reads.

    A rank reads its own parts. If another count of ranks wrote the save, rank 0 reads all parts.
    """
    parts = {}
    for name, sizes in extra["sizes"].items():
        size = sizes[comm.rank] if len(sizes) == comm.size else sum(sizes) * (comm.rank == 0)
        parts[name] = np.empty(size, np.uint8)
    return parts


def restore(
    parts: Tree, extra: Any, replica: Replica, run: Run, comm: Communicator
) -> tuple[tuple[StepRecord, ...], dict[str, Any] | None]:
    """Restore the replica and the run (collective) and return records and position of batches."""
    sizes = extra["sizes"]
    same = len(sizes["replica"]) == comm.size
    state = parts["replica"].tobytes()
    first = state[: sizes["replica"][0]]
    if not (same and all(sizes["replica"])):  # the save has rank 0's replica only
        state = bcast_bytes(comm, first)
    position: dict[str, Any] | None = None
    with raise_on_all_ranks(comm):
        replica.load(state)
        if same:
            replica.load_random_state(parts["random"].tobytes())
            position = json.loads(parts["batches"].tobytes())
        elif comm.rank == 0:
            position = _earliest(parts["batches"].tobytes(), sizes["batches"])
    run.load(extra["run"])
    if not same:
        position = comm.mpi.bcast(position)
    run.step_number = extra["step"]
    records = tuple(
        StepRecord(*numbers[:-1], staleness=tuple(numbers[-1])) for numbers in extra["records"]
    )
    return records, position


def _earliest(data: bytes, sizes: list[int]) -> dict[str, Any] | None:
    """Return the position of the rank that had seen the fewest batches."""
    ends = np.cumsum([0, *sizes]).tolist()
    positions = [json.loads(data[a:b]) for a, b in itertools.pairwise(ends)]
    known = [position for position in positions if position is not None]
    return min(known, key=lambda p: (p["epoch"], p["batch"]), default=None)
