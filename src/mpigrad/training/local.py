"""Local SGD: ranks train separately, and average their parameters at intervals."""

from __future__ import annotations

import dataclasses
import math
import operator
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.training.exchange import Exchange
from mpigrad.training.history import StepRecord
from mpigrad.training.replica import Batch, Replica
from mpigrad.training.strategy import Run, Session, Strategy, combined_wishes, raise_step_error

__all__ = ["LocalRun", "LocalSGD"]

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
_WEIGHT, _LOSS, _STEPS, _ENDED, _FAILED = range(5)


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
        mine = np.array([self._weight, self._loss, self._steps, ended, error is not None])
        reports = np.empty((self.comm.size, mine.size))
        self.comm.mpi.Allgather(mine, reports)
        if reports[:, _FAILED].any():  # other ranks keep their steps until the next mean
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
            self._average(step, mine[_WEIGHT] / total)
        elif not math.isfinite(mine[_LOSS]):
            raise FloatingPointError(
                f"trainer: after step {step} the loss is {mine[_LOSS]}. Use a smaller learning "
                "rate."
            )
        self.step_number = step
        spent = time.perf_counter() - begun
        return StepRecord(
            step=self.step_number,
            loss=math.fsum(reports[:, _LOSS]) / total,
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
