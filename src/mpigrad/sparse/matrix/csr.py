"""A matrix's rows in the native library: products with vectors, and gathers by row and column."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mpigrad.operations import neighbor_alltoallv
from mpigrad.operations.indexing import take
from mpigrad.operations.local_programs import as_array
from mpigrad.sparse.matrix.ghost_exchange import GhostExchange
from mpigrad.sparse.matrix.multilinear import TrilinearContraction, contract, select
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = [
    "apply",
    "diagonal",
    "gather_by_column",
    "gather_by_row",
    "ghost_values",
    "multiply",
    "pool_positions",
    "select_columns",
    "stored_order",
]


def pool_positions(pattern: Pattern) -> np.ndarray:
    """Return the position of each entry's column among own and ghost columns, in row order."""
    positions = pattern.columns - pattern.column_offset
    remote = (positions < 0) | (positions >= pattern.n_local_columns)
    ghost = np.searchsorted(pattern.ghosts.ghosts, pattern.columns[remote])
    positions[remote] = pattern.n_local_columns + ghost
    return positions


def _n_local_and_ghost(pattern: Pattern) -> int:
    return pattern.n_local_columns + len(pattern.ghosts.ghosts)


def stored_order(pattern: Pattern, row_order: np.ndarray) -> np.ndarray:
    """Permute one integer for each entry from row order to the order of the stored values."""
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


def apply(pattern: Pattern, values: jax.Array, x: jax.Array) -> jax.Array:
    """Multiply with own and ghost entries: (nnz,), (n_own + n_ghosts, ...) -> (n_local, ...)."""
    return contract(_matrix(pattern), values, x)


def multiply(pattern: Pattern, values: jax.Array, x: jax.Array) -> jax.Array:
    """Multiply with own entries: (nnz,), (n_local_columns, ...) -> (n_local, ...) (collective)."""
    return contract(_matrix(pattern), values, x, ghost_values(pattern.ghosts, x))


def gather_by_row(pattern: Pattern, d: jax.Array) -> jax.Array:
    """Return for each stored entry the value of its row: (n_local,) -> (nnz,)."""

    def make() -> TrilinearContraction:
        return TrilinearContraction.selection(stored_order(pattern, pattern.rows), pattern.n_local)

    return select(_cached(pattern, "gather by row", make), d)


def gather_by_column(pattern: Pattern, d: jax.Array) -> jax.Array:
    """Return for each stored entry its column's value: (n_columns,) -> (nnz,) (collective)."""
    return select(_columns(pattern), d, ghost_values(pattern.ghosts, d))


def select_columns(pattern: Pattern, d: jax.Array) -> jax.Array:
    """Return for each stored entry its column's value: (n_own + n_ghosts,) -> (nnz,)."""
    return select(_columns(pattern), d)


def _columns(pattern: Pattern) -> TrilinearContraction:
    def make() -> TrilinearContraction:
        positions = stored_order(pattern, pool_positions(pattern))
        return TrilinearContraction.selection(positions, _n_local_and_ghost(pattern))

    return _cached(pattern, "gather by column", make)


def diagonal(pattern: Pattern, values: jax.Array) -> jax.Array:
    """Return the diagonal entries of this rank's rows, zero in rows without one."""

    def make() -> TrilinearContraction:
        return TrilinearContraction.selection(pattern.diagonal, pattern.nnz)

    return select(_cached(pattern, "diagonal", make), values)


def ghost_values(ghosts: GhostExchange, x: Any) -> jax.Array | None:
    """Return the ghost entries alone, so that own entries are not copied."""
    if not ghosts.neighbors:
        return None
    x = as_array(x)
    return neighbor_alltoallv(
        take(x, ghosts.send_index),
        ghosts.neighbors,
        ghosts.sendcounts,
        ghosts.recvcounts,
        ghosts.comm,
    )
