"""A matrix's rows in the native library: products with vectors, and entries of vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.operations import neighbor_alltoallv
from mpigrad.operations.indexing import take
from mpigrad.sparse.matrix.ghost_exchange import GhostExchange
from mpigrad.sparse.matrix.multilinear import TrilinearContraction, contract, select
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = [
    "apply",
    "diagonal",
    "gather_by_column",
    "gather_by_row",
    "multiply",
    "pool_positions",
    "stored_order",
]


def pool_positions(pattern: Pattern) -> np.ndarray:
    """Where each entry's column stands among own and ghost columns, in row order."""
    positions = pattern.columns - pattern.column_offset
    remote = (positions < 0) | (positions >= pattern.n_local_columns)
    found = np.searchsorted(pattern.ghosts.ghosts, pattern.columns[remote])
    positions[remote] = pattern.n_local_columns + found
    return positions


def _n_local_and_ghost(pattern: Pattern) -> int:
    return pattern.n_local_columns + len(pattern.ghosts.ghosts)


def stored_order(pattern: Pattern, row_order: np.ndarray) -> np.ndarray:
    """Numbers of entries in row order, in the order of the stored values."""
    stored = np.empty_like(row_order)
    stored[pattern.order] = row_order
    return stored


def _cached(
    pattern: Pattern, name: str, make: Callable[[], TrilinearContraction]
) -> TrilinearContraction:
    if name not in pattern.derived:
        pattern.derived[name] = make()
    return pattern.derived[name]


def _matrix(pattern: Pattern) -> TrilinearContraction:
    return _cached(
        pattern,
        "matrix",
        lambda: TrilinearContraction.matrix(
            pattern.row_starts,
            pool_positions(pattern),
            _n_local_and_ghost(pattern),
            None if pattern.is_ordered else pattern.order,
        ),
    )


def apply(pattern: Pattern, values: jax.Array, pool: jax.Array) -> jax.Array:
    """Rows times own and ghost entries: (nnz,), (n_pool, ...) -> (n_local, ...)."""
    return contract(_matrix(pattern), values, pool)


def multiply(pattern: Pattern, values: jax.Array, x: jax.Array) -> jax.Array:
    """A x of own entries: (nnz,), (n_local_columns, ...) -> (n_local, ...) (collective)."""
    return contract(_matrix(pattern), values, x, _received(pattern.ghosts, x))


def gather_by_row(pattern: Pattern, d: jax.Array) -> jax.Array:
    """For each stored entry the number of its row: (n_local,) -> (nnz,)."""

    def make() -> TrilinearContraction:
        return TrilinearContraction.selection(stored_order(pattern, pattern.rows), pattern.n_local)

    return select(_cached(pattern, "at rows", make), d)


def gather_by_column(pattern: Pattern, d: jax.Array) -> jax.Array:
    """For each stored entry the number of its column: (n_local_columns,) -> (nnz,) (collective)."""

    def make() -> TrilinearContraction:
        positions = stored_order(pattern, pool_positions(pattern))
        return TrilinearContraction.selection(positions, _n_local_and_ghost(pattern))

    return select(_cached(pattern, "at columns", make), d, _received(pattern.ghosts, d))


def diagonal(pattern: Pattern, values: jax.Array) -> jax.Array:
    """The diagonal entries of this rank's rows, zero where the pattern has none."""

    def make() -> TrilinearContraction:
        return TrilinearContraction.selection(pattern.diagonal, pattern.nnz)

    return select(_cached(pattern, "diagonal", make), values)


def _received(ghosts: GhostExchange, x: Any) -> jax.Array | None:
    """The ghost entries alone: own entries are not copied beside them."""
    if not ghosts.neighbors:
        return None
    x = jnp.asarray(x)
    return neighbor_alltoallv(
        take(x, ghosts.send_index),
        ghosts.neighbors,
        ghosts.sendcounts,
        ghosts.recvcounts,
        ghosts.comm,
    )
