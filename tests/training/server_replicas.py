"""NumPy replicas and a session that only stores records, for tests of the parameter server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from mpigrad.training.flat_buffer import Parameter
from mpigrad.training.history import StepRecord
from mpigrad.training.replica import Batch, Replica
from mpigrad.training.strategy import SAVE


class NumpyReplica(Replica):
    """Arrays with loss and gradients by `compute`, and gradient descent with momentum."""

    def __init__(
        self,
        arrays: list[np.ndarray],
        compute: Callable[..., tuple[float, list[np.ndarray | None]]],
        rate: float = 0.1,
        momentum: float = 0.0,
    ) -> None:
        names = [Parameter(f"layer{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
        super().__init__(names)
        self.arrays = [a.copy() for a in arrays]
        self.speed = [np.zeros_like(a) for a in arrays]
        self.compute, self.rate, self.momentum = compute, rate, momentum
        self.skipped: list[frozenset[int]] = []

    @property
    def model(self) -> list[np.ndarray]:
        return self.arrays

    def gradient(
        self,
        batch: Batch,
        weight: float,
        ready: Callable[[int], None] | None = None,
        *,
        add: bool = False,
    ) -> float:
        assert weight > 0 and not add
        loss, gradients = self.compute(self.arrays, *batch)
        for place, gradient in zip(self.gradients.arrays, gradients, strict=True):
            place[...] = 0 if gradient is None else gradient * place.dtype.type(weight)
        self.unused = frozenset(i for i, g in enumerate(gradients) if g is None)
        for index in self.gradients.order if ready else ():
            ready(index)
        return loss

    def update(self, skip: frozenset[int] = frozenset()) -> None:
        self.skipped.append(skip)
        for i, gradient in enumerate(self.gradients.arrays):
            self.speed[i] *= self.momentum
            self.speed[i] += gradient
            self.arrays[i] -= self.rate * self.speed[i]

    def read(self) -> None:
        for place, array in zip(self.values.arrays, self.arrays, strict=True):
            place[...] = array

    def write(self) -> None:
        for place, array in zip(self.values.arrays, self.arrays, strict=True):
            array[...] = place

    def state(self) -> bytes:
        return b"".join(x.tobytes() for x in (*self.arrays, *self.speed))

    def load(self, state: bytes) -> None:
        numbers = np.frombuffer(state, np.uint8)
        for x in (*self.arrays, *self.speed):
            x.view(np.uint8).reshape(-1)[...] = numbers[: x.nbytes]
            numbers = numbers[x.nbytes :]


def squares(arrays: list[np.ndarray], a: np.ndarray, b: np.ndarray) -> tuple[float, Any]:
    """Mean square of a @ x + y - b."""
    x, y = arrays
    misfit = a @ x + y - b
    gradient = 2 / len(b) * misfit
    return float(np.mean(misfit**2)), [a.T @ gradient, gradient.sum(keepdims=True)]


@dataclasses.dataclass
class Session:
    """Store records, and make a wish after the update `wish_at`, which `done` answers."""

    steps: int | None = None
    wish_at: int | None = None
    wish: int = SAVE
    done: Callable[[], bool] = bool
    records: list[StepRecord] = dataclasses.field(default_factory=list)

    @property
    def attentive(self) -> bool:
        return self.wish_at is not None

    def note(self, record: StepRecord) -> None:
        self.records.append(record)

    def wishes(self) -> int:
        return self.wish if self.records and self.records[-1].step == self.wish_at else 0

    def act(self, wishes: int) -> bool:
        assert wishes == self.wish
        return self.done()
