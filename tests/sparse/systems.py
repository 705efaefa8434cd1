"""Sparse systems that are the same for any number of ranks, and their dense reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.sparse import Matrix, Pattern


def stripes(n: int, size: int, empty: int | None = None) -> list[int]:
    """Row counts of all ranks: uneven, and none on rank `empty`."""
    weights = [0.0 if rank == empty else 1.0 + rank % 3 for rank in range(size)]
    edges = np.rint(n * np.concatenate([[0], np.cumsum(weights)]) / sum(weights)).astype(int)
    return [int(k) for k in np.diff(edges)]


@dataclass(frozen=True)
class System:
    """A = shifted weighted graph Laplacian of an nx x ny grid: symmetric positive definite."""

    pattern: Pattern
    rows: np.ndarray  # of all ranks' entries, in the order in which ranks give them
    columns: np.ndarray
    all_values: np.ndarray
    all_b: np.ndarray
    entries: slice  # this rank's, among all
    mine: slice  # this rank's rows

    @property
    def values(self) -> Any:
        return jnp.asarray(self.all_values[self.entries])

    @property
    def b(self) -> Any:
        return jnp.asarray(self.all_b[self.mine])

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.pattern, self.values)

    def dense(self, values: Any) -> Any:
        n = self.pattern.n_rows
        return jnp.zeros((n, n)).at[self.rows, self.columns].set(values)


def grid_system(
    comm: Communicator, shape: tuple[int, int] = (6, 5), empty: int | None = None
) -> System:
    nx, ny = shape
    n = nx * ny
    cell = np.arange(n).reshape(ny, nx)
    generator = np.random.default_rng(3)
    links = [(cell[:, :-1].ravel(), cell[:, 1:].ravel()), (cell[:-1].ravel(), cell[1:].ravel())]
    i, j = (np.concatenate(parts) for parts in zip(*links, strict=True))
    weight = generator.uniform(0.5, 2, len(i))
    diagonal = 0.3 + np.bincount(i, weight, n) + np.bincount(j, weight, n)
    rows = np.concatenate([i, j, np.arange(n)])
    columns = np.concatenate([j, i, np.arange(n)])
    values = np.concatenate([-weight, -weight, diagonal])
    shuffled = generator.permutation(len(rows))  # entries may come in any order
    rows, columns, values = rows[shuffled], columns[shuffled], values[shuffled]

    sizes = stripes(n, comm.size, empty)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    owner = np.searchsorted(starts, rows, side="right") - 1
    by_rank = np.argsort(owner, kind="stable")
    rows, columns, values, owner = (a[by_rank] for a in (rows, columns, values, owner))
    first, last = np.searchsorted(owner, [comm.rank, comm.rank + 1])
    pattern = Pattern.from_coo(rows[first:last], columns[first:last], sizes[comm.rank], comm)
    return System(
        pattern,
        rows,
        columns,
        values,
        generator.standard_normal(n),
        slice(int(first), int(last)),
        slice(int(starts[comm.rank]), int(starts[comm.rank + 1])),
    )
