"""Synchronous training: every update is that of one big batch."""

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
from mpigrad.training.history import Record, Span
from mpigrad.training.replica import Batch, Replica
from mpigrad.training.replica_sync import check_settings
from mpigrad.training.strategy import Run, Session, Strategy, fail, following, joined

__all__ = ["Synchronous", "SynchronousRun"]


@dataclasses.dataclass(frozen=True)
class Synchronous(Strategy):
    """All ranks take each step together, along the gradient of the mean loss over all samples.

    The update is that of one rank with all the samples, to rounding: gradients are means weighted
    by samples, summed in the order of the ranks, so that every rank has the same bits and the
    parameters stay equal without being sent. A parameter that no rank's loss depends on is left
    alone by a PyTorch optimizer, as on one rank; where some ranks' do, the others' gradients are
    zeros. Each gradient is multiplied by its number of samples before they are added: parameters of
    float16, unlike those of bfloat16, may have too small a range for that.

    Attributes
    ----------
    bucket_mib, first_bucket_mib
        Gradients travel in buckets of this size (MiB), the first, which is ready first, smaller.
    overlap
        Send buckets while the backward pass goes on.
    compression
        Send gradients as float16 or bfloat16 numbers; they are added in float32.
    accumulate
        Parts that a batch is computed in, one after the other, for lack of memory: every array of a
        batch is cut along its leading axis, whose length must be the number of samples.
    clip
        Mean gradients of a larger two-norm, over all parameters, are made shorter.
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
                raise ValueError(f"Synchronous: {name}={value} must be positive")
        if operator.index(self.accumulate) < 1:
            raise ValueError(f"Synchronous: accumulate={self.accumulate} must be at least 1")
        if self.compression not in (None, "float16", "bfloat16"):
            raise ValueError(
                f"Synchronous: compression={self.compression!r} must be 'float16', 'bfloat16' or "
                "None"
            )

    def start(self, replica: Replica, comm: Communicator) -> SynchronousRun:
        return SynchronousRun(self, replica, comm)


# What ranks tell each other at the end of a step.
_LOSS, _FAILED, _SQUARE, _UNUSED = range(4)


class SynchronousRun(Run):
    """A synchronous training.

    Its spans are the gradient, each bucket from its sending until the sum is there (beside the
    gradient, where they overlap), and the optimizer's step.
    """

    def __init__(self, settings: Synchronous, replica: Replica, comm: Communicator) -> None:
        self.replica, self.comm = replica, comm
        self.shard, self.keeps_state = (comm.rank, comm.size), comm.rank == 0
        self._settings = settings
        self._first_order = replica.gradients.order
        self._order: list[int] | None = []  # in which gradients got ready; None: arranged
        self._exchange = self._new_exchange()

    def _new_exchange(self) -> Exchange:
        s = self._settings
        return Exchange(
            self.replica.gradients, self.comm, s.bucket_mib, s.first_bucket_mib, s.compression
        )

    def state(self) -> list[int] | None:
        """The order of gradients: with it the norm has the same bits, and what is clipped."""
        return list(self.replica.gradients.order) if self._order is None else None

    def load(self, state: list[int] | None) -> None:
        self._lay_out(self._first_order if state is None else state)
        self._order = [] if state is None else None

    def train(self, batches: Iterator[Batch], session: Session) -> None:
        while session.steps is None or self.step_number < session.steps:
            record = self._update(following(batches))
            if record is None:
                return
            session.note(record)
            if session.attentive and session.act(joined(self.comm, session.wishes())):
                return

    def step(self, batch: Batch) -> Record:
        record = self._update(batch)
        assert record is not None  # this rank has a batch
        return record

    def _update(self, batch: Batch | Exception | None) -> Record | None:
        """One update; None where no rank has a batch left."""
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
        told = self._tell(loss, error)
        exposed = time.perf_counter() - computed
        weights, _, marks = exchange.weights().T
        self._check(error, told, weights, marks)
        norm = exchange.norm(
            told[:, _SQUARE],
            f"trainer: step {self.step_number + 1} is not made, as its gradient is",
        )
        skip = self._skipped(told)
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
        return Record(
            step=self.step_number,
            loss=math.fsum(weights * told[:, _LOSS]) / total,
            samples=total,
            seconds=self.clock(),
            gradient_norm=norm,
            communication=hidden + exposed,
            exposed=exposed,
        )

    def _parts(self, batch: Batch) -> list[tuple[Batch, float]]:
        """The batch in the parts that it is computed in, with their weights; no empty ones."""
        count = self._settings.accumulate
        parts = [batch]
        if count > 1:
            rows = self.replica.samples(batch)
            for leaf in jax.tree.leaves(batch):
                if getattr(leaf, "shape", ()) and leaf.shape[0] != rows:
                    raise ValueError(
                        f"Synchronous: accumulate={count} cuts every array of a batch along its "
                        f"leading axis of samples; one has shape {tuple(leaf.shape)}, and there "
                        f"are {rows} samples: keep it in the loss"
                    )
            ends = [rows * i // count for i in range(count + 1)]
            parts = [
                jax.tree.map(lambda x: x[a:b] if getattr(x, "shape", ()) else x, batch)  # noqa: B023
                for a, b in itertools.pairwise(ends)
            ]
        weighed = [(part, self.replica.weight(part)) for part in parts]
        return [(part, weight) for part, weight in weighed if weight > 0]

    def _gradient(self, parts: list[tuple[Batch, float]]) -> float:
        """The gradient of all parts; the mean loss."""
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
        """What every rank says at the end of a step, shape (ranks, 4)."""
        mine = np.array([loss, error is not None, self._exchange.square, len(self.replica.unused)])
        everybody = np.empty((self.comm.size, mine.size))
        self.comm.mpi.Allgather(mine, everybody)
        return everybody

    def _check(self, error: Exception | None, told: Any, weights: Any, marks: Any) -> None:
        if told[:, _FAILED].any():
            fail(self.comm, error)
        if (marks != marks[0]).any():
            check_settings(self.replica, self.comm)
        if not weights.any():
            raise ValueError("trainer: the batches of all ranks are empty (of weight 0) in a step")

    def _skipped(self, told: Any) -> frozenset[int]:
        """The parameters that no rank's loss depends on."""
        if not told[:, _UNUSED].all():
            return frozenset()
        mine = np.zeros(len(self.replica.parameters), np.uint8)
        mine[list(self.replica.unused)] = 1
        self.comm.mpi.Allreduce(MPI.IN_PLACE, mine, MPI.MIN)
        return frozenset(np.flatnonzero(mine).tolist())

    def _arrange(self, root: int) -> None:
        """After the first step: lay gradients out as they got ready on a rank that had samples."""
        if self._order is None or not self._settings.overlap:
            return
        order = self.comm.mpi.bcast(self._order, root)
        self._order = None
        if len(order) == len(self.replica.parameters):  # a replica need not say what is ready
            self._lay_out(order)

    def _lay_out(self, order: Sequence[int]) -> None:
        """Lay gradients out in this order, the same on all ranks (collective)."""
        if tuple(order) != self.replica.gradients.order:
            self._exchange.close()
            self.replica.arrange(order)
            self._exchange = self._new_exchange()
