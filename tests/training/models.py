"""Small models with a serial reference of their training."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from mpigrad.training import Batches, Parameter, Replica

ROWS = 37
X = np.random.default_rng(1).standard_normal((ROWS, 5))
Y = np.sin(X @ np.random.default_rng(2).standard_normal((5, 3)))


def batches(size: int = 13, **options: Any) -> Batches:
    """Batches of the data, with sizes that are not multiples of the count of ranks."""
    return Batches(ROWS, size, seed=3, take=lambda i: (X[i], Y[i]), **options)


class Linear(Replica):
    """Least squares for y = x w and y = b (float32) in NumPy, with momentum."""

    rate, momentum = 0.05, 0.9

    def __init__(self, seed: int = 0) -> None:
        super().__init__([Parameter("w", (5, 3), "float64"), Parameter("b", (3,), "float32")])
        rng = np.random.default_rng(seed)
        self.arrays = [rng.standard_normal((5, 3)), np.zeros(3, np.float32)]
        self.velocities = [np.zeros_like(a) for a in self.arrays]
        self.updates = 0

    @property
    def model(self) -> list[Any]:
        return [a.copy() for a in self.arrays]

    def gradient(self, batch: Any, weight: float, ready: Any = None, *, add: bool = False) -> float:
        x, y = batch
        error, other = x @ self.arrays[0] - y, self.arrays[1] - y
        found = [x.T @ error * (2 / error.size), other.sum(0) * (2 / other.size)]
        for index in self.gradients.order:
            place = self.gradients.arrays[index]
            place[...] = weight * found[index] + (place if add else 0)
            if ready is not None:
                ready(index)
        self.unused = frozenset()
        return float(np.mean(error**2) + np.mean(other**2))

    def update(self, skip: frozenset[int] = frozenset()) -> None:
        self.updates += 1
        for index, gradient in enumerate(self.gradients.arrays):
            if index not in skip:
                self.velocities[index] *= self.momentum
                self.velocities[index] += gradient
                self.arrays[index] -= (
                    self.arrays[index].dtype.type(self.rate) * self.velocities[index]
                )

    def read(self) -> None:
        for place, array in zip(self.values.arrays, self.arrays, strict=True):
            place[...] = array

    def write(self) -> None:
        for place, array in zip(self.values.arrays, self.arrays, strict=True):
            array[...] = place

    def state(self) -> bytes:
        file = io.BytesIO()
        np.savez(file, *self.arrays, *self.velocities)
        return file.getvalue()

    def load(self, state: bytes) -> None:
        with np.load(io.BytesIO(state)) as found:
            arrays = [found[name] for name in found.files]
        self.arrays, self.velocities = arrays[:2], arrays[2:]

    def train_alone(self, steps: int, size: int = 13, clip: float | None = None) -> list[float]:
        """Train on one rank with global batches, and return the losses."""
        losses = []
        for _, batch in zip(range(steps), batches(size), strict=False):
            losses.append(self.gradient(batch, 1.0))
            norm = np.sqrt(sum(float(np.sum(g**2)) for g in self.gradients.arrays))
            if clip is not None and norm > clip:
                self.gradients.multiply(clip / norm)
            self.update()
        return losses


def assert_close(got: Any, expected: Any, rtol: float = 1e-12) -> None:
    """Compare lists of arrays, with the tolerance 1e-6 for float32."""
    for a, b in zip(got, expected, strict=True):
        bound = rtol if np.asarray(a).dtype == np.float64 else 1e-6
        np.testing.assert_allclose(a, b, rtol=bound, atol=bound * np.abs(b).max())
