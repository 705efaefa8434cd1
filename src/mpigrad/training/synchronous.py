"""Synchronous training, and local SGD, which averages the parameters at intervals."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.training.exchange import Exchange
from mpigrad.training.history import Span, StepRecord
from mpigrad.training.replica import Batch, Replica, check_settings
from mpigrad.training.strategy import (
    Run,
    Session,
    Strategy,
    combined_wishes,
    next_batch,
    raise_step_error,
)

__all__ = [
    "LocalRun",
    "LocalSGD",
    "Synchronous",
    "SynchronousRun",
]

# ---- Synchronous training: every update equals the update of one rank with the global batch ----


@dataclasses.dataclass(frozen=True)
class Synchronous(Strategy):
    """Update all ranks together, with the gradient of the mean loss over all samples.

    The update equals, to rounding, the update of one rank with all the samples. Gradients are means
    weighted by the count of samples, and summed in the order of ranks. So every rank has the same
    bits, and the parameters stay equal without being sent.

    A PyTorch optimizer does not change a parameter on which no rank's loss depends, as on one rank.
    If the loss of some ranks depends on the parameter, the gradients of the other ranks are zeros.

    Each gradient is multiplied by its count of samples before the sum. The range of float16
    parameters may be too small for that, but the range of bfloat16 is not.

    Attributes
    ----------
    bucket_mib, first_bucket_mib
        Sizes in MiB of the buckets in which gradients are sent. The first bucket, which is complete
        first, is smaller.
    overlap
        True to send buckets during the backward pass.
    compression
        The dtype in which gradients are sent: "float16", "bfloat16", or None for their own dtype.
        They are added in float32.
    accumulate
        Count of parts in which a batch is computed one after the other, to save memory. Every array
        of a batch is split along its leading axis, whose length must be the count of samples.
    clip
        The largest two-norm of the mean gradient over all parameters, to which longer gradients are
        scaled, or None.

    Raises
    ------
    ValueError
        If an attribute is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import optax
    >>> from mpigrad import training
    >>> x = np.linspace(0, 1, 8)
    >>> loss = lambda params, x, y: ((params["a"] * x - y) ** 2).mean()
    >>> strategy = training.Synchronous(clip=0.5)
    >>> trainer = training.trainer({"a": np.float32(0.0)}, optax.sgd(1.0), loss, strategy)
    >>> record = trainer.step(x, 3 * x)
    >>> print(record.gradient_norm > 0.5, trainer.model["a"])
    True 0.5
    """

    bucket_mib: float = 25.0
    first_bucket_mib: float = 1.0
    overlap: bool = True
    compression: Literal["float16", "bfloat16"] | None = None
    accumulate: int = 1
    clip: float | None = None

    def __post_init__(self) -> None:
        for name in ("bucket_mib", "first_bucket_mib", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"Synchronous: {name} must be positive, got {value}. Pass a positive number."
                )
        if operator.index(self.accumulate) < 1:
            raise ValueError(
                f"Synchronous: accumulate must be at least 1, got {self.accumulate}. Pass a "
                "positive count."
            )
        if self.compression not in (None, "float16", "bfloat16"):
            raise ValueError(
                "Synchronous: compression must be 'float16', 'bfloat16' or None, got "
                f"{self.compression!r}. Pass one of these."
            )

    def start(self, replica: Replica, comm: Communicator) -> SynchronousRun:
        return SynchronousRun(self, replica, comm)


# The columns of the ranks' reports at the end of a step.
_LOSS, _FAILED, _SQUARE, _UNUSED = range(4)


class SynchronousRun(Run):
    """A synchronous training.

    Its spans are the gradient, each bucket from its sending until its sum is complete, and the
    optimizer's step. With overlap the buckets run during the gradient.
    """

    def __init__(self, settings: Synchronous, replica: Replica, comm: Communicator) -> None:
        self.replica, self.comm = replica, comm
        self.shard, self.keeps_state = (comm.rank, comm.size), comm.rank == 0
        self._settings = settings
        self._first_order = replica.gradients.order
        self._order: list[int] | None = []  # of completion of gradients, or None if laid out
        self._exchange = self._new_exchange()

    def _new_exchange(self) -> Exchange:
        s = self._settings
        return Exchange(
            self.replica.gradients, self.comm, s.bucket_mib, s.first_bucket_mib, s.compression
        )

    def state(self) -> list[int] | None:
        """Return the order of gradients, on which the bits of norms and clipping depend."""
        return list(self.replica.gradients.order) if self._order is None else None

    def load(self, state: list[int] | None) -> None:
        self._lay_out(self._first_order if state is None else state)
        self._order = [] if state is None else None

    def train(self, batches: Iterator[Batch], session: Session) -> None:
        while session.steps is None or self.step_number < session.steps:
            record = self._update(next_batch(batches))
            if record is None:
                return
            session.note(record)
            if session.attentive and session.act(combined_wishes(self.comm, session.wishes())):
                return

    def step(self, batch: Batch) -> StepRecord:
        record = self._update(batch)
        assert record is not None  # this rank has a batch
        return record

    def _update(self, batch: Batch | Exception | None) -> StepRecord | None:
        """Make one update, or return None if all batches have ended."""
        error = batch if isinstance(batch, Exception) else None
        parts: list[tuple[Batch, float]] = []
        if batch is not None and not isinstance(batch, Exception):
            try:
                parts = self._parts(batch)
            except Exception as raised:  # all ranks have to know
                error = raised
        weight = math.fsum(w for _, w in parts)
        exchange = self._exchange
        exchange.begin(weight, ended=batch is None, mark=self.replica.checksum())
        if self._order is not None:
            self._order = []
        if batch is None and exchange.weights()[:, 1].all():
            return None
        begun, loss = time.perf_counter(), 0.0
        if parts and error is None:
            try:
                loss = self._gradient(parts)
            except Exception as raised:
                error = raised
        elif error is None:
            self.replica.no_gradient()
        computed, hidden = time.perf_counter(), exchange.seconds
        exchange.finish()
        reports = self._tell(loss, error)
        exposed = time.perf_counter() - computed
        weights, _, marks = exchange.weights().T
        self._check(error, reports, weights, marks)
        norm = exchange.norm(
            reports[:, _SQUARE],
            f"trainer: step {self.step_number + 1} is not made, because its gradient is",
        )
        skip = self._skipped(reports)
        if self._settings.clip is not None and norm > self._settings.clip:
            self.replica.gradients.multiply(self._settings.clip / norm)
        stepping = time.perf_counter()
        self.replica.update(skip)
        self.spans = [
            Span("gradient", begun, computed),
            *exchange.spans,
            Span("update", stepping, time.perf_counter()),
        ]
        self._arrange(int(np.flatnonzero(weights)[0]))
        self.step_number += 1
        total = math.fsum(weights)
        return StepRecord(
            step=self.step_number,
            loss=math.fsum(weights * reports[:, _LOSS]) / total,
            samples=total,
            seconds=self.clock(),
            gradient_norm=norm,
            communication=hidden + exposed,
            exposed=exposed,
        )

    def _parts(self, batch: Batch) -> list[tuple[Batch, float]]:
        """Return the non-empty parts in which a batch is computed, with their weights."""
        count = self._settings.accumulate
        parts = [batch]
        if count > 1:
            rows = self.replica.samples(batch)
            for leaf in jax.tree.leaves(batch):
                if getattr(leaf, "shape", ()) and leaf.shape[0] != rows:
                    raise ValueError(
                        f"Synchronous: accumulate={count} splits every array of a batch along its "
                        f"leading axis, which must have the length {rows} of the samples, got "
                        f"shape {tuple(leaf.shape)}. Keep that array in the loss."
                    )
            ends = [rows * i // count for i in range(count + 1)]
            parts = [
                jax.tree.map(lambda x: x[a:b] if getattr(x, "shape", ()) else x, batch)  # noqa: B023
                for a, b in itertools.pairwise(ends)
            ]
        weighed = [(part, self.replica.weight(part)) for part in parts]
        return [(part, weight) for part, weight in weighed if weight > 0]

    def _gradient(self, parts: list[tuple[Batch, float]]) -> float:
        """Compute the gradient of all parts and return the mean loss."""
        loss = 0.0
        for number, (part, weight) in enumerate(parts):
            last = number == len(parts) - 1
            ready = self._ready if last and self._settings.overlap else None
            loss += weight * self.replica.gradient(part, weight, ready, add=number > 0)
        self.computed = True
        return loss / math.fsum(weight for _, weight in parts)

    def _ready(self, index: int) -> None:
        if self._order is not None:
            self._order.append(index)
        self._exchange.ready(index)

    def _tell(self, loss: float, error: Exception | None) -> Any:
        """Gather the reports of all ranks at the end of a step, shape (ranks, 4)."""
        report = np.array(
            [loss, error is not None, self._exchange.square, len(self.replica.unused)]
        )
        everybody = np.empty((self.comm.size, report.size))
        self.comm.mpi.Allgather(report, everybody)
        return everybody

    def _check(self, error: Exception | None, reports: Any, weights: Any, marks: Any) -> None:
        if reports[:, _FAILED].any():
            raise_step_error(self.comm, error)
        if (marks != marks[0]).any():
            check_settings(self.replica, self.comm)
        if not weights.any():
            raise ValueError(
                "trainer: in a step the batches of all ranks are empty (weight 0). Leave out such "
                "batches."
            )

    def _skipped(self, reports: Any) -> frozenset[int]:
        """Return the parameters on which no rank's loss depends."""
        if not reports[:, _UNUSED].all():
            return frozenset()
        is_unused = np.zeros(len(self.replica.parameters), np.uint8)
        is_unused[list(self.replica.unused)] = 1
        self.comm.mpi.Allreduce(MPI.IN_PLACE, is_unused, MPI.MIN)
        return frozenset(np.flatnonzero(is_unused).tolist())

    def _arrange(self, root: int) -> None:
        """Lay gradients out after the first step, in their order of completion on the root."""
        if self._order is None or not self._settings.overlap:
            return
        order = self.comm.mpi.bcast(self._order, root)
        self._order = None
        if len(order) == len(self.replica.parameters):  # a replica may not report completion
            self._lay_out(order)

    def _lay_out(self, order: Sequence[int]) -> None:
        """Lay gradients out in this order, the same on all ranks (collective)."""
        if tuple(order) != self.replica.gradients.order:
            self._exchange.close()
            self.replica.arrange(order)
            self._exchange = self._new_exchange()


# ---- Local SGD: ranks train separately, and average their parameters at intervals ----


_BUCKET = 4.0  # MiB, small enough that one bucket is added while the next is sent


@dataclasses.dataclass(frozen=True)
class LocalSGD(Strategy):
    """Train each rank separately, and average the parameters of all ranks at intervals.

    The mean is weighted by the count of samples that each rank has seen since the last mean. Each
    rank has its own optimizer state, such as momentum (Stich, ICLR 2019, arXiv:1805.09767).

    `Trainer.run` ends with a mean. With `Trainer.step` every `every`-th step ends with a mean.
    Between means each rank has its own model, and `step` returns the rank's own records, which are
    not in the history. `run([])` averages the remaining steps.

    Attributes
    ----------
    every
        Count of steps between means. `every=1` with plain SGD equals `Synchronous` to rounding.

    Raises
    ------
    ValueError
        If `every` is less than 1.

    Examples
    --------
    >>> import numpy as np
    >>> import optax
    >>> from mpigrad import training
    >>> x = np.linspace(0, 1, 32)
    >>> loss = lambda params, x, y: ((params["a"] * x - y) ** 2).mean()
    >>> strategy = training.LocalSGD(every=4)
    >>> trainer = training.trainer({"a": np.float32(0.0)}, optax.sgd(1.0), loss, strategy)
    >>> history = trainer.run(training.Batches(32, 8, epochs=20, take=lambda i: (x[i], 3 * x[i])))
    >>> [record.step for record in history.records[:3]]
    [4, 8, 12]
    """

    every: int = 8

    def __post_init__(self) -> None:
        if operator.index(self.every) < 1:
            raise ValueError(
                f"LocalSGD: every must be at least 1, got {self.every}. Pass a positive count."
            )

    def start(self, replica: Replica, comm: Communicator) -> LocalRun:
        return LocalRun(self, replica, comm)


# The columns of the ranks' reports before a mean.
_WEIGHT, _LOCAL_LOSS, _STEPS, _ENDED, _LOCAL_FAILED = range(5)


class LocalRun(Run):
    """A training by local steps, with a record and a decision about the end after each mean."""

    keeps_state = True  # the optimizers' states differ

    def __init__(self, settings: LocalSGD, replica: Replica, comm: Communicator) -> None:
        self.replica, self.comm = replica, comm
        self.shard = comm.rank, comm.size
        self._every = settings.every
        self._exchange = Exchange(replica.values, comm, _BUCKET, _BUCKET, weigh=True)
        self._steps, self._weight, self._loss = 0, 0.0, 0.0  # since the last mean

    def train(self, batches: Iterator[Batch], session: Session) -> None:
        while session.steps is None or self.step_number < session.steps:
            left = math.inf if session.steps is None else session.steps - self.step_number
            error, ended = None, False
            try:
                while self._steps < min(self._every, left) and not ended:
                    batch = next(batches, None)
                    ended = batch is None
                    if batch is not None:
                        self._local_step(batch)
            except Exception as raised:  # all ranks have to know
                error = raised
            record = self._mean(error, ended)
            if record is None:
                return
            session.note(record)
            if session.attentive and session.act(combined_wishes(self.comm, session.wishes())):
                return

    def step(self, batch: Batch) -> StepRecord:
        """Make a local step. All ranks average their models after `every` steps."""
        error, loss = None, math.nan
        try:
            loss = self._local_step(batch)
        except Exception as raised:
            error = raised
        if error is None and self._steps < self._every:
            weight = self.replica.weight(batch)
            return StepRecord(self.step_number + self._steps, loss, weight, self.clock())
        record = self._mean(error, ended=False)
        assert record is not None
        return record

    def state(self) -> None:
        if self._steps:
            raise ValueError(
                f"LocalSGD: a save needs the mean of all ranks, but {self._steps} steps were made "
                f"since the last mean. Save after a multiple of {self._every} steps."
            )

    def load(self, state: Any) -> None:
        self._steps, self._weight, self._loss = 0, 0.0, 0.0

    def _local_step(self, batch: Batch) -> float:
        weight, loss = self.replica.weight(batch), math.nan
        if weight > 0:
            loss, self.computed = self.replica.gradient(batch, 1.0), True
            self.replica.update(self.replica.unused)
            self._loss += weight * loss
        self._weight += weight
        self._steps += 1
        return loss

    def _mean(self, error: Exception | None, ended: bool) -> StepRecord | None:
        """Average the parameters, or return None if all batches have ended and no step was made."""
        begun = time.perf_counter()
        report = np.array([self._weight, self._loss, self._steps, ended, error is not None])
        reports = np.empty((self.comm.size, report.size))
        self.comm.mpi.Allgather(report, reports)
        if reports[:, _LOCAL_FAILED].any():  # other ranks keep their steps until the next mean
            raise_step_error(self.comm, error)
        if reports[:, _ENDED].all() and not reports[:, _STEPS].any():
            return None
        # All ranks raise any error from here on, and begin a new interval.
        self._steps, self._weight, self._loss = 0, 0.0, 0.0
        total = math.fsum(reports[:, _WEIGHT])
        if not total > 0:
            raise ValueError(
                "trainer: the batches of all ranks are empty (weight 0). Leave out empty batches."
            )
        step = self.step_number + int(reports[:, _STEPS].max())
        if self.comm.size > 1:
            self._average(step, report[_WEIGHT] / total)
        elif not math.isfinite(report[_LOCAL_LOSS]):
            raise FloatingPointError(
                f"trainer: after step {step} the loss is {report[_LOCAL_LOSS]}. Use a "
                "smaller learning rate."
            )
        self.step_number = step
        spent = time.perf_counter() - begun
        return StepRecord(
            step=self.step_number,
            loss=math.fsum(reports[:, _LOCAL_LOSS]) / total,
            samples=total,
            seconds=self.clock(),
            communication=spent,
            exposed=spent,
        )

    def _average(self, step: int, share: float) -> None:
        replica, exchange = self.replica, self._exchange
        replica.read()
        exchange.begin(share)
        exchange.finish()
        squares = np.empty(self.comm.size)
        self.comm.mpi.Allgather(np.array([exchange.square]), squares)
        exchange.norm(squares, f"trainer: after step {step} the parameters are")
        replica.write()
