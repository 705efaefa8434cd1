"""Local SGD: ranks train on their own, and average their parameters now and then."""

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
from mpigrad.training.history import Record
from mpigrad.training.replica import Batch, Replica
from mpigrad.training.strategy import Run, Session, Strategy, fail, joined

__all__ = ["LocalRun", "LocalSGD"]

_BUCKET = 4.0  # MiB; while one is added, the next is on its way


@dataclasses.dataclass(frozen=True)
class LocalSGD(Strategy):
    """Every rank makes steps of its own; now and then all take their parameters' mean.

    The mean is weighted by the samples that each rank has seen since the last one. Each rank keeps
    the state of its optimizer (momentum, say) to itself (Stich, ICLR 2019, arXiv:1805.09767).

    `Trainer.run` ends with a mean. By `Trainer.step` each `every`-th step ends with one; in between
    the model is this rank's own, as are the records that `step` returns, which the history leaves
    out. `run([])` takes the mean of the steps that are left.

    Attributes
    ----------
    every
        Steps between means. With 1 and plain SGD it is `Synchronous`, to rounding.
    """

    every: int = 8

    def __post_init__(self) -> None:
        if operator.index(self.every) < 1:
            raise ValueError(f"LocalSGD: every={self.every} must be at least 1")

    def start(self, replica: Replica, comm: Communicator) -> LocalRun:
        return LocalRun(self, replica, comm)


# What ranks tell each other before a mean.
_WEIGHT, _LOSS, _STEPS, _ENDED, _FAILED = range(5)


class LocalRun(Run):
    """A training by local steps: a record, and a word about the end, after each mean."""

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
            if session.attentive and session.act(joined(self.comm, session.wishes())):
                return

    def step(self, batch: Batch) -> Record:
        """One local step; each `every`-th is a mean as well, whose record is that of all ranks."""
        error, loss = None, math.nan
        try:
            loss = self._local_step(batch)
        except Exception as raised:
            error = raised
        if error is None and self._steps < self._every:
            weight = self.replica.weight(batch)
            return Record(self.step_number + self._steps, loss, weight, self.clock())
        record = self._mean(error, ended=False)
        assert record is not None
        return record

    def state(self) -> None:
        if self._steps:
            raise ValueError(
                f"LocalSGD: save after a mean, not {self._steps} steps behind one: every "
                f"{self._every} steps the parameters are those of all ranks"
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

    def _mean(self, error: Exception | None, ended: bool) -> Record | None:
        """The parameters' mean; None where all batches have ended, and no step has been made."""
        begun = time.perf_counter()
        mine = np.array([self._weight, self._loss, self._steps, ended, error is not None])
        told = np.empty((self.comm.size, mine.size))
        self.comm.mpi.Allgather(mine, told)
        if told[:, _FAILED].any():  # the steps of the others count: all meet at the next mean
            fail(self.comm, error)
        if told[:, _ENDED].all() and not told[:, _STEPS].any():
            return None
        # Whatever is raised from here on, all ranks raise it, and begin a new interval.
        self._steps, self._weight, self._loss = 0, 0.0, 0.0
        total = math.fsum(told[:, _WEIGHT])
        if not total > 0:
            raise ValueError("trainer: the batches of all ranks are empty (of weight 0)")
        step = self.step_number + int(told[:, _STEPS].max())
        if self.comm.size > 1:
            self._average(step, mine[_WEIGHT] / total)
        elif not math.isfinite(mine[_LOSS]):
            raise FloatingPointError(f"trainer: after step {step} the loss is {mine[_LOSS]}")
        self.step_number = step
        spent = time.perf_counter() - begun
        return Record(
            step=self.step_number,
            loss=math.fsum(told[:, _LOSS]) / total,
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
