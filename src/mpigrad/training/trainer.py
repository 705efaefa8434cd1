"""The trainer: a model, an optimizer and a loss, trained by all ranks together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mpigrad.checkpoint import Checkpoint, CheckpointSession, Store
from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.profiling import Progress
from mpigrad.training import strategy as saved_state
from mpigrad.training.batches import Batches
from mpigrad.training.history import History, Span, StepRecord
from mpigrad.training.replica import (
    Batch,
    Replica,
    bcast_bytes,
    synchronize,
    warn_if_replicas_differ,
)
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
    """Make a trainer of one model on all ranks, with synchronized replicas (collective).

    Parameters
    ----------
    model
        A `torch.nn.Module`, or a pytree of floating-point JAX or NumPy arrays, or your own
        `Replica` (then omit optimizer, loss and weight).
    optimizer
        A `torch.optim.Optimizer` over the parameters of a module, or an
        `optax.GradientTransformation` for a pytree.
    loss
        A function loss(model, *batch) that returns the mean over the batch's samples, a real
        scalar.
    strategy
        `Synchronous(...)`, `LocalSGD(...)` or `ParameterServer(...)`.
    weight
        A function weight(*batch) that returns the weight of a batch in means over ranks (default:
        the length of the leading axis of its first array).
    comm
        The communicator (default: the default communicator).

    Raises
    ------
    TypeError, ValueError
        On every rank, if an argument does not fit, or if names, shapes or dtypes of parameters
        differ between ranks. The error names the first such parameter and the rank.

    Notes
    -----
    All ranks start with rank 0's parameters, buffers and optimizer state. If those of another rank
    differed, rank 0 prints a warning once.

    Examples
    --------
    >>> import numpy as np
    >>> import optax
    >>> from mpigrad import training
    >>> x = np.linspace(0, 1, 32)
    >>> loss = lambda params, x, y: ((params["a"] * x - y) ** 2).mean()
    >>> trainer = training.trainer({"a": np.float32(0.0)}, optax.sgd(1.0), loss)
    >>> history = trainer.run(training.Batches(32, 8, epochs=20, take=lambda i: (x[i], 3 * x[i])))
    >>> print(len(history.records), round(float(trainer.model["a"]), 3))
    80 3.0
    """
    comm = resolve(comm)
    with raise_on_all_ranks(comm):
        if not isinstance(strategy, Strategy):
            hint = f"Write {strategy.__name__}()" if isinstance(strategy, type) else "Pass one"
            raise TypeError(
                f"trainer: expected a strategy such as Synchronous(), got {strategy!r}. {hint}."
            )
        replica = _replica(model, optimizer, loss, weight)
    assert_same_on_all_ranks(comm, repr(strategy), "trainer: the strategy")
    space = _space(comm)
    synchronize(replica, space)
    return Trainer(replica, strategy.start(replica, space), space, type(strategy).__name__)


@functools.cache
def _space(comm: Communicator) -> Communicator:
    """Return the message space of all trainings on these ranks, which never run concurrently."""
    return comm.dup()


def _replica(model: Any, optimizer: Any, loss: Any, weight: Any) -> Replica:
    if isinstance(model, Replica):
        arguments = {"optimizer": optimizer, "loss": loss, "weight": weight}
        for name, value in arguments.items():
            if value is not None:
                raise TypeError(
                    f"trainer: {name} has no effect with a Replica, got {value!r}. Leave {name} "
                    "out."
                )
        return model
    if not callable(loss):
        raise TypeError(
            f"trainer: loss must be a function loss(model, *batch), got {loss!r}. Pass a function."
        )
    if "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module):
        from mpigrad.training.torch_replica import TorchReplica

        return TorchReplica(model, optimizer, loss, weight)
    from mpigrad.training.replica import JaxReplica

    return JaxReplica(model, optimizer, loss, weight)


class Trainer:
    """A training of one model on all ranks, made by `trainer`.

    Attributes
    ----------
    replica
        This rank's copy of the model, with the interface for strategies.
    comm
        The ranks, with a separate message space.
    shard
        (index, count): this rank takes part `index` of `count` parts of each global batch, from
        `Batches` or your own loader. The count is 0 on a rank that takes no samples (a parameter
        server).

    Examples
    --------
    >>> import numpy as np
    >>> import optax
    >>> from mpigrad import training
    >>> x = np.linspace(0, 1, 8)
    >>> loss = lambda params, x, y: ((params["a"] * x - y) ** 2).mean()
    >>> trainer = training.trainer({"a": np.float32(0.0)}, optax.sgd(1.0), loss)
    >>> trainer.step(x, 3 * x).step
    1
    >>> path = trainer.save("saves")
    >>> trainer.resume("saves"), trainer.shard
    (True, (0, 1))
    """

    def __init__(self, replica: Replica, run: Run, comm: Communicator, strategy: str) -> None:
        self.replica, self._run, self.comm, self._strategy = replica, run, comm, strategy
        self.shard = run.shard
        self._records: list[StepRecord] = []
        self._interrupted = self._running = False
        self._batches: Batches | None = None
        self._position: dict[str, Any] | None = None  # of the batches of the next run
        self._saved_in: set[str] = set()  # directories to which it saved, or from which it resumed
        self._begun = time.monotonic()
        run.clock = lambda: time.monotonic() - self._begun

    @property
    def history(self) -> History:
        """All updates so far."""
        return History(tuple(self._records), self._interrupted)

    @property
    def spans(self) -> Sequence[Span]:
        """The activities of this rank in the last step, for a timeline, if they are recorded."""
        return self._run.spans

    @property
    def model(self) -> Any:
        """The module, or a copy of the pytree of parameters, after the last update."""
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
            `Batches(...)`, or any iterable of tuples that the loss takes as `*batch`. An element
            that is neither a tuple nor a list is the only argument. The counts of batches may
            differ between ranks, and batches may be empty. Ranks then take part with weight 0.
        steps
            Count of updates after which to end, including those of earlier runs, the same on all
            ranks.
        callback
            A function of the `StepRecord` that is called after each update. All ranks end if it
            returns True on one rank. With a parameter server only the server calls it.
        checkpoint
            A `mpigrad.checkpoint.Checkpoint`, which determines when the state is saved. It is also
            saved at the end. If the directory has a save that this trainer neither wrote nor
            loaded, such as a save of an earlier job, the run resumes from it with
            `Checkpoint(..., resume=True)` and replaces it with `overwrite=True`. Otherwise it is an
            error.
        progress
            True to show a progress line.

        Returns
        -------
        The `History` of all updates so far.

        Raises
        ------
        StepError
            If another rank has failed, which raises its own error.
        FileExistsError
            On every rank, if the directory of the checkpoint has an earlier run. It names the last
            step and its date.
        FloatingPointError
            On every rank, if the gradient (with `LocalSGD`: a parameter) has a non-finite number.
            The error names the parameter and the ranks. The parameters are those before the step.
        """
        with raise_on_all_ranks(self.comm):
            if not isinstance(batches, Iterable):
                raise TypeError(
                    f"Trainer.run: batches must be iterable, got {batches!r}. Pass Batches or a "
                    "list of batches."
                )
            if steps is not None and operator.index(steps) < 0:
                raise ValueError(
                    f"Trainer.run: steps must not be negative, got {steps}. Pass a count or None."
                )
            if not isinstance(checkpoint, Checkpoint | None):
                raise TypeError(
                    "Trainer.run: expected a mpigrad.checkpoint.Checkpoint as checkpoint, got "
                    f"{checkpoint!r}. Pass Checkpoint(directory, ...)."
                )
            if isinstance(batches, Batches):
                if batches.shard not in (None, self.shard):
                    raise ValueError(
                        f"Trainer.run: the batches have the shard {batches.shard}, but rank "
                        f"{self.comm.rank} has the shard {self.shard}. Make Batches with "
                        "shard=trainer.shard, or without shard."
                    )
                batches.default_shard = self.shard
        agreed = steps, callback is None, checkpoint is None
        assert_same_on_all_ranks(
            self.comm, agreed, "Trainer.run: (steps, callback is None, checkpoint is None)"
        )
        self._batches = batches if isinstance(batches, Batches) else None
        settings = self.comm.mpi.allgather(self._batches and self._batches.settings())
        known = [(rank, value) for rank, value in enumerate(settings) if value is not None]
        for rank, value in known:
            if value != known[0][1]:
                raise ValueError(
                    "Trainer.run: the Batches must be the same on all ranks, got "
                    f"{known[0][1]} on rank {known[0][0]} and {value} on rank {rank}. Make them "
                    "with the same arguments."
                )
        if self._records:  # the time between runs does not count
            self._begun = time.monotonic() - self._records[-1].seconds
        session = _Session(self, steps, callback)
        with contextlib.ExitStack() as stack:
            if checkpoint is not None:
                is_own_save = os.path.abspath(checkpoint.directory) in self._saved_in
                if is_own_save:
                    checkpoint = dataclasses.replace(checkpoint, resume=True, overwrite=False)
                begun = checkpoint.start(self.comm, self._run.step_number)
                session.saving = stack.enter_context(begun)
                if not is_own_save:
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
        """Make one update (collective), with a strategy whose ranks step together (see `run`)."""
        record = self._run.step(batch)
        if record.step == self._run.step_number:  # not a local step of LocalSGD
            self._note(record)
        return record

    def save(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> pathlib.Path:
        """Save the state from which `resume` continues with the same bits (collective).

        The state is the model, the optimizer, the position in `Batches` and each rank's random
        generator of PyTorch. See `mpigrad.checkpoint.Store` for the files.

        Parameters
        ----------
        directory
            The directory of the saves.
        overwrite
            True to replace the saves of an earlier run in this directory.

        Raises
        ------
        FileExistsError
            On every rank, if the directory has saves that this trainer neither wrote nor loaded. It
            names the last step and its date.
        """
        if self._running and not self.shard[1]:
            raise RuntimeError(
                "Trainer.save: cannot be called in the callback of a parameter server, because the "
                "other ranks do not call it. Pass checkpoint= to run."
            )
        is_own_save = os.path.abspath(directory) in self._saved_in
        store = Store(
            directory, self.comm, resume=is_own_save, overwrite=overwrite and not is_own_save
        )
        store.forbid_earlier_run("Trainer.save", resume="trainer.resume(directory)")
        return self._saved(store)

    def resume(self, directory: str | os.PathLike[str]) -> bool:
        """Resume from the newest save in a directory (collective), or return False.

        The next `run` with `Batches` continues at the saved position. On another count of ranks
        the results agree to rounding, and random generators keep their present state.

        Raises
        ------
        ValueError
            On every rank, if the save belongs to another model or another strategy.
        """
        return self._restored(Store(directory, self.comm))

    # ---- history ----

    def _note(self, record: StepRecord) -> None:
        self._records.append(record)

    def _progress(self, steps: int | None) -> Progress:
        total = steps
        if total is None and self._batches is not None and self._batches.left is not None:
            total = self._run.step_number + self._run.updates_of(self._batches.left)
        if total is None:
            raise ValueError(
                "Trainer.run: progress=True needs a known count of updates. Pass steps=, or "
                "Batches with epochs=."
            )
        return Progress(total, self.comm.rank)

    def _share(self) -> None:
        """Copy buffers and records to all ranks (collective)."""
        reports = self.comm.mpi.allgather((self._run.computed, len(self._records)))
        computed, lengths = zip(*reports, strict=True)
        root = computed.index(True) if any(computed) else 0
        buffers = bcast_bytes(self.comm, self.replica.buffers(), root)
        with raise_on_all_ranks(self.comm):
            if buffers and self.comm.rank != root:
                self.replica.load_buffers(buffers)
        if len(set(lengths)) > 1:  # only the server has all records
            self._records = self.comm.mpi.bcast(self._records)

    def _compare(self) -> None:
        """Print a warning if replicas differ (collective)."""
        warn_if_replicas_differ(
            self.replica,
            self.comm,
            "now differ from rank 0's. Check whether the program changed parameters or optimizer "
            "settings on one rank, or whether the ranks have different processors",
        )

    # ---- saves ----

    def _saved(self, store: Store | CheckpointSession) -> pathlib.Path:
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

    def _restored(self, store: Store | CheckpointSession) -> bool:
        where = _directory(store)
        saved = store.load(
            None,
            saved_state.LAYOUT,
            lambda extra: saved_state.check(
                saved_state.unwrap(extra), self.replica, self._strategy, where
            ),
            make_like=lambda extra: saved_state.local_parts(saved_state.unwrap(extra), self.comm),
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
    """The session of a trainer, see `strategy.Session`."""

    def __init__(
        self, trainer: Trainer, steps: int | None, callback: Callable[[StepRecord], Any] | None
    ) -> None:
        self.steps = steps
        self.saving: CheckpointSession | None = None
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
            bits |= SAVE * self.saving.due(step) | STOP * self.saving.stop_requested()
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


def _directory(store: Store | CheckpointSession) -> pathlib.Path:
    return (store.store if isinstance(store, CheckpointSession) else store).directory


def _tuples(batches: Iterable[Any]) -> Iterator[Batch]:
    for batch in batches:
        yield tuple(batch) if isinstance(batch, tuple | list) else (batch,)
