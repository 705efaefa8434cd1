"""The verb `trainer`: a model, an optimizer and a loss, trained by all ranks together."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mpigrad.checkpoint import Checkpoint, Saving, Store
from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.profiling.progress_bar import Progress
from mpigrad.training import state as saved_state
from mpigrad.training.batches import Batches
from mpigrad.training.history import History, Span, StepRecord
from mpigrad.training.replica import Batch, Replica
from mpigrad.training.replica_sync import bcast_bytes, synchronize, warn_if_replicas_differ
from mpigrad.training.strategy import END, FAILED, SAVE, STOP, Run, Strategy, raise_step_error
from mpigrad.training.synchronous import Synchronous

__all__ = ["Trainer", "trainer"]


def trainer(
    model: Any,
    optimizer: Any = None,
    loss: Callable[..., Any] | None = None,
    strategy: Strategy = Synchronous(),  # noqa: B008 (frozen)
    *,
    weight: Callable[..., float] | None = None,
    comm: Communicator | None = None,
) -> Trainer:
    """Make the replicas of all ranks equal, and begin to train them (collective).

    Parameters
    ----------
    model
        A `torch.nn.Module`; a pytree of JAX's or NumPy's floating-point arrays; or a `Replica` of
        your own, with optimizer and loss None.
    optimizer
        For a module a `torch.optim.Optimizer` over its parameters; for a pytree an
        `optax.GradientTransformation`.
    loss
        loss(model, *batch) -> the mean over the batch's samples: a real scalar.
    strategy
        `Synchronous(...)`, `LocalSGD(...)` or `ParameterServer(...)`.
    weight
        weight(*batch) -> what a batch counts in means over ranks; if not given, the length of the
        leading axis of its first array.
    comm
        The ranks; all of them if not given.

    Raises
    ------
    TypeError, ValueError
        On every rank: arguments that do not fit, or parameters whose names, shapes or dtypes
        differ between ranks (the first that does, and the rank, are named).

    Notes
    -----
    All ranks begin with rank 0's parameters, buffers and optimizer state. Where others were
    different, rank 0 says so once.
    """
    comm = resolve(comm)
    with raise_on_all_ranks(comm):
        if not isinstance(strategy, Strategy):
            hint = "; write its settings in parentheses" if isinstance(strategy, type) else ""
            raise TypeError(
                f"trainer: the strategy must be one such as Synchronous(), not {strategy!r}{hint}"
            )
        replica = _replica(model, optimizer, loss, weight)
    assert_same_on_all_ranks(comm, repr(strategy), "trainer: the strategy")
    space = _space(comm)
    synchronize(replica, space)
    return Trainer(replica, strategy.start(replica, space), space, type(strategy).__name__)


@functools.cache
def _space(comm: Communicator) -> Communicator:
    """The message space of all trainings on these ranks: they never run at the same time."""
    return comm.dup()


def _replica(model: Any, optimizer: Any, loss: Any, weight: Any) -> Replica:
    if isinstance(model, Replica):
        return model
    if not callable(loss):
        raise TypeError(f"trainer: loss must be a function, not {loss!r}")
    if "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module):
        from mpigrad.training.torch_replica import TorchReplica

        return TorchReplica(model, optimizer, loss, weight)
    from mpigrad.training.jax_replica import JaxReplica

    return JaxReplica(model, optimizer, loss, weight)


class Trainer:
    """A training of one model on all ranks; `trainer` makes it.

    Attributes
    ----------
    replica
        This rank's copy of the model, as strategies see it.
    comm
        The ranks, with a message space of their own.
    shard
        (index, count): which part of each global batch this rank takes, for `Batches` or for a
        loader of your own; count is 0 on a rank that takes none (a parameter server).
    """

    def __init__(self, replica: Replica, run: Run, comm: Communicator, strategy: str) -> None:
        self.replica, self._run, self.comm, self._strategy = replica, run, comm, strategy
        self.shard = run.shard
        self._records: list[StepRecord] = []
        self._interrupted = self._running = False
        self._batches: Batches | None = None
        self._position: dict[str, Any] | None = None  # of batches that are yet to be given
        self._saved_in: set[str] = set()  # directories that its saves are in, or it went on from
        self._begun = time.monotonic()
        run.clock = lambda: time.monotonic() - self._begun

    @property
    def history(self) -> History:
        """All updates so far."""
        return History(tuple(self._records), self._interrupted)

    @property
    def spans(self) -> Sequence[Span]:
        """What this rank did in the latest step, for a timeline; nothing where it is not noted."""
        return self._run.spans

    @property
    def model(self) -> Any:
        """The module, or a copy of the parameters' pytree; trained as far as `history` says."""
        return self.replica.model

    def run(
        self,
        batches: Iterable[Any],
        *,
        steps: int | None = None,
        callback: Callable[[StepRecord], Any] | None = None,
        checkpoint: Checkpoint | None = None,
        progress: bool = False,
    ) -> History:
        """Train until the batches end on all ranks (collective).

        Parameters
        ----------
        batches
            `Batches(...)`, or any iterable of tuples that the loss takes as `*batch` (what is no
            tuple or list is its only argument). Ranks may have different numbers of batches, and
            batches without samples: they take part with weight 0.
        steps
            End after this many updates, those of earlier runs included; equal on all ranks.
        callback
            record -> whether to end, called after each update; all ranks end where one's says so.
            Under a parameter server it is called on the server alone.
        checkpoint
            A `mpigrad.checkpoint.Checkpoint`: the state is saved as it says and at the end. In a
            directory that this trainer has neither saved to nor gone on from, a run that finds
            another one's save (an earlier job's) goes on from there.
        progress
            Show a line that says how far it has come.

        Returns
        -------
        The `History` of all updates so far.

        Raises
        ------
        StepError
            Another rank has failed (it raises its own error).
        FloatingPointError
            On every rank: the gradient has a number that is not finite; the parameter and the
            ranks are named, and the parameters are those before the step. Of `LocalSGD` it is the
            parameters that are not finite.
        """
        with raise_on_all_ranks(self.comm):
            if not isinstance(batches, Iterable):
                raise TypeError(f"trainer: batches must be iterable, not {batches!r}")
            if steps is not None and operator.index(steps) < 0:
                raise ValueError(f"trainer: steps={steps} must not be negative")
            if not isinstance(checkpoint, Checkpoint | None):
                raise TypeError(
                    "trainer: checkpoint must be a mpigrad.checkpoint.Checkpoint, not "
                    f"{checkpoint!r}"
                )
            if isinstance(batches, Batches):
                if batches.shard not in (None, self.shard):
                    raise ValueError(
                        f"trainer: the batches are for shard {batches.shard}, and rank "
                        f"{self.comm.rank}'s is {self.shard}; give shard=trainer.shard, or none"
                    )
                batches.default_shard = self.shard
        agreed = steps, callback is None, checkpoint is None
        assert_same_on_all_ranks(
            self.comm, agreed, "trainer: steps, and whether callback and checkpoint are None"
        )
        self._batches = batches if isinstance(batches, Batches) else None
        settings = self.comm.mpi.allgather(self._batches and self._batches.settings())
        known = [(rank, value) for rank, value in enumerate(settings) if value is not None]
        for rank, value in known:
            if value != known[0][1]:
                raise ValueError(
                    "trainer: the Batches must be equal on all ranks: "
                    f"rank {known[0][0]} {known[0][1]}, {rank} {value}"
                )
        if self._records:  # what passed between runs does not count
            self._begun = time.monotonic() - self._records[-1].seconds
        session = _Session(self, steps, callback)
        with contextlib.ExitStack() as stack:
            if checkpoint is not None:
                begun = checkpoint.start(self.comm, self._run.step_number)
                session.saving = stack.enter_context(begun)
                if os.path.abspath(checkpoint.directory) not in self._saved_in:
                    self._restored(session.saving)
            with raise_on_all_ranks(self.comm):
                if self._batches is not None and self._position is not None:
                    self._batches.load(self._position)
                    self._position = None
                if progress:
                    session.progress = self._progress(steps)
            if session.progress is not None:
                stack.callback(session.progress.close)
            self._running = True
            stack.callback(setattr, self, "_running", False)
            self._run.train(_tuples(batches), session)
            if session.saving is not None and session.saved_at != self._run.step_number:
                self._saved(session.saving)
            else:
                self._share()
                self._compare()
        self._interrupted = session.interrupted
        return self.history

    def step(self, *batch: Any) -> StepRecord:
        """One update (collective), where the strategy goes step by step; see `run`."""
        record = self._run.step(batch)
        if record.step == self._run.step_number:  # not a step of this rank alone (LocalSGD)
            self._note(record)
        return record

    def save(self, directory: str | os.PathLike[str]) -> pathlib.Path:
        """Write all that is needed to go on, bit for bit, with `resume` (collective).

        Model, optimizer, the position in `Batches` and each rank's generator of PyTorch; see
        `mpigrad.checkpoint.Store`.
        """
        if self._running and not self.shard[1]:
            raise RuntimeError(
                "trainer: a parameter server's callback, which no other rank calls, cannot save; "
                "give checkpoint= to run"
            )
        return self._saved(Store(directory, self.comm))

    def resume(self, directory: str | os.PathLike[str]) -> bool:
        """Go on from the newest save in a directory (collective); False where there is none.

        The next `run` with a `Batches` goes on at its saved position. On another number of ranks
        the training goes on to rounding, with random generators as they are.

        Raises
        ------
        ValueError
            On every rank: the save is of another model, or of another strategy.
        """
        return self._restored(Store(directory, self.comm))

    # ---- how far it has come ----

    def _note(self, record: StepRecord) -> None:
        self._records.append(record)

    def _progress(self, steps: int | None) -> Progress:
        total = steps
        if total is None and self._batches is not None and self._batches.left is not None:
            total = self._run.step_number + self._run.updates_of(self._batches.left)
        if total is None:
            raise ValueError(
                "trainer: progress needs to know the end: give steps=, or Batches with epochs="
            )
        return Progress(total, self.comm.rank)

    def _share(self) -> None:
        """Equal buffers and records everywhere (collective)."""
        reports = self.comm.mpi.allgather((self._run.computed, len(self._records)))
        computed, lengths = zip(*reports, strict=True)
        root = computed.index(True) if any(computed) else 0
        buffers = bcast_bytes(self.comm, self.replica.buffers(), root)
        with raise_on_all_ranks(self.comm):
            if buffers and self.comm.rank != root:
                self.replica.load_buffers(buffers)
        if len(set(lengths)) > 1:  # only the server has them all
            self._records = self.comm.mpi.bcast(self._records)

    def _compare(self) -> None:
        """Say where replicas have ceased to be equal (collective)."""
        warn_if_replicas_differ(
            self.replica,
            self.comm,
            "have become others than rank 0's: has the program changed parameters or the "
            "optimizer's settings on one rank, or is its arithmetic that of another processor?",
        )

    # ---- saves ----

    def _saved(self, store: Store | Saving) -> pathlib.Path:
        self._share()
        position = self._position if self._batches is None else self._batches.state()
        parts: saved_state.Tree = {}
        with raise_on_all_ranks(self.comm):
            parts = saved_state.rank_parts(
                self.replica, self._run, position if self.shard[1] else None
            )
        extra = saved_state.metadata(
            parts, self.replica, self._run, self.comm, self._strategy, self._records
        )
        self._compare()
        path = store.save(self._run.step_number, parts, saved_state.LAYOUT, extra)
        self._saved_in.add(os.path.abspath(_directory(store)))
        return path

    def _restored(self, store: Store | Saving) -> bool:
        where = _directory(store)
        saved = store.load(
            None,
            saved_state.LAYOUT,
            lambda extra: saved_state.check(
                saved_state.unwrap(extra), self.replica, self._strategy, where
            ),
            like_of=lambda extra: saved_state.local_parts(saved_state.unwrap(extra), self.comm),
        )
        if saved is None:
            return False
        records, self._position = saved_state.restore(
            saved.tree, saved_state.unwrap(saved.extra), self.replica, self._run, self.comm
        )
        self._records = list(records)
        self._saved_in.add(os.path.abspath(where))
        if records:
            self._begun = time.monotonic() - records[-1].seconds
        return True


class _Session:
    """See `strategy.Session`."""

    def __init__(
        self, trainer: Trainer, steps: int | None, callback: Callable[[StepRecord], Any] | None
    ) -> None:
        self.steps = steps
        self.saving: Saving | None = None
        self.progress: Progress | None = None
        self.saved_at = -1  # step
        self.interrupted = False
        self._trainer, self._callback = trainer, callback
        self._ends, self._error = False, None

    @property
    def attentive(self) -> bool:
        return self._callback is not None or self.saving is not None

    def note(self, record: StepRecord) -> None:
        self._trainer._note(record)
        if self.progress is not None:
            self.progress.update(record.step, loss=record.loss)
        if self._callback is not None:
            try:
                self._ends = bool(self._callback(record))
            except Exception as error:  # all ranks have to know
                self._error = error

    def wishes(self) -> int:
        bits = END * self._ends | FAILED * (self._error is not None)
        if self.saving is not None:
            step = self._trainer._run.step_number
            bits |= SAVE * self.saving.due(step) | STOP * self.saving.asked_to_stop()
        return bits

    def act(self, wishes: int) -> bool:
        if wishes & FAILED:
            raise_step_error(self._trainer.comm, self._error)
        if wishes & (SAVE | STOP):
            assert self.saving is not None
            self._trainer._saved(self.saving)
            self.saved_at = self._trainer._run.step_number
        self.interrupted = wishes & STOP > 0
        return wishes & (END | STOP) > 0


def _directory(store: Store | Saving) -> pathlib.Path:
    return (store.store if isinstance(store, Saving) else store).directory


def _tuples(batches: Iterable[Any]) -> Iterator[Batch]:
    for batch in batches:
        yield tuple(batch) if isinstance(batch, tuple | list) else (batch,)
