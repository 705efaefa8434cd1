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
    """A sparse matrix, on the ranks and whole, and a right-hand side."""

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
        p = self.pattern
        return jnp.zeros((p.n_rows, p.n_columns)).at[self.rows, self.columns].set(values)


def grid_system(
    comm: Communicator, shape: tuple[int, int] = (6, 5), empty: int | None = None
) -> System:
    """A shifted weighted graph Laplacian of an nx x ny grid: symmetric positive definite."""
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
    b = generator.standard_normal(n)
    return _on_ranks(comm, (rows, columns, values), b, stripes(n, comm.size, empty))


def rectangular_system(comm: Communicator, n_rows: int, n_columns: int) -> System:
    """Random entries. On several ranks the first has no rows, the last no columns."""
    generator = np.random.default_rng(n_rows)
    cells = generator.permutation(n_rows * n_columns)[: n_rows * n_columns // 3]
    entries = (cells // n_columns, cells % n_columns, generator.standard_normal(len(cells)))
    several = comm.size > 1
    return _on_ranks(
        comm,
        entries,
        generator.standard_normal(n_rows),
        stripes(n_rows, comm.size, 0 if several else None),
        stripes(n_columns, comm.size, comm.size - 1 if several else None),
    )


def _on_ranks(
    comm: Communicator,
    entries: tuple[np.ndarray, np.ndarray, np.ndarray],
    b: np.ndarray,
    sizes: list[int],
    column_sizes: list[int] | None = None,
) -> System:
    """The system of entries (rows, columns, values), each on the rank that owns its row."""
    rows, columns, values = entries
    starts = np.concatenate([[0], np.cumsum(sizes)])
    owner = np.searchsorted(starts, rows, side="right") - 1
    by_rank = np.argsort(owner, kind="stable")
    rows, columns, values, owner = (a[by_rank] for a in (rows, columns, values, owner))
    first, last = np.searchsorted(owner, [comm.rank, comm.rank + 1])
    pattern = Pattern.from_coo(
        rows[first:last],
        columns[first:last],
        sizes[comm.rank],
        comm,
        n_local_columns=None if column_sizes is None else column_sizes[comm.rank],
    )
    return System(
        pattern,
        rows,
        columns,
        values,
        b,
        slice(int(first), int(last)),
        slice(int(starts[comm.rank]), int(starts[comm.rank + 1])),
    )
