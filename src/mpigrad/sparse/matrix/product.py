"""The product of two matrices, with its pattern and row exchange made once for each pair."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from mpigrad.operations import neighbor_alltoallv
from mpigrad.sparse.matrix.csr import pool_positions
from mpigrad.sparse.matrix.multilinear import (
    TrilinearContraction,
    contract,
    multiply_patterns,
    select,
)
from mpigrad.sparse.matrix.neighbor_exchange import exchange_with_neighbors, split_by_counts
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.matrix.plan_cache import cached_plan

__all__ = ["multiply_matrices", "product_pattern"]

_TASK = "the making of a product's pattern"


@dataclasses.dataclass(frozen=True)
class _Product:
    """The plan of a product A B.

    Attributes
    ----------
    pattern
        The pattern of the product.
    pairs
        The pairs of values of A and B that are multiplied, and the target of each product.
    row_order
        The permutation of own values of B to row order, or None if they are stored so.
    send, neighbors, sendcounts, recvcounts
        The values in the rows of B that the neighbours read, packed by neighbour.
    """

    pattern: Pattern
    pairs: TrilinearContraction
    row_order: TrilinearContraction | None
    send: TrilinearContraction
    neighbors: tuple[int, ...]
    sendcounts: tuple[int, ...]
    recvcounts: tuple[int, ...]


def product_pattern(a: Pattern, b: Pattern) -> Pattern:
    """Return the pattern of A B, stored in row order (collective at the first call)."""
    return _plan(a, b).pattern


def multiply_matrices(
    a: Pattern, a_values: Any, b: Pattern, b_values: Any
) -> tuple[Pattern, jax.Array]:
    """A B (collective): one message to each neighbour, then a multiplication for each meeting.

    Entry (i, k) of A meets the entries (k, j) of B. For rows k of other ranks, values come by one
    message from each neighbour.
    """
    plan = _plan(a, b)
    own = b_values if plan.row_order is None else select(plan.row_order, b_values)
    rest = None
    if plan.neighbors:
        rest = neighbor_alltoallv(
            select(plan.send, b_values), plan.neighbors, plan.sendcounts, plan.recvcounts, a.comm
        )
    return plan.pattern, contract(plan.pairs, a_values, own, rest)


def _plan(a: Pattern, b: Pattern) -> _Product:
    def check() -> str:
        if a.n_columns != b.n_rows:
            return (
                f"the matrices have shapes ({a.n_rows}, {a.n_columns}) and "
                f"({b.n_rows}, {b.n_columns}), but the first must have as many columns as the "
                "second has rows. Give matching shapes."
            )
        if a.n_local_columns != b.n_local:
            return (
                f"rank {a.comm.rank} owns {a.n_local_columns} columns of the first matrix but "
                f"{b.n_local} rows of the second. Make them with the same stripes."
            )
        return ""

    return cached_plan("A @ B", a, b, check, lambda: _make(a, b))


def _make(a: Pattern, b: Pattern) -> _Product:
    comm, ghosts = a.comm, a.ghosts
    # The ranks that read this rank's entries of x in A x read its rows of B.
    sizes = np.diff(b.row_starts)[ghosts._send]
    going = _ranges(b.row_starts[:-1][ghosts._send], sizes)
    sent = split_by_counts(sizes, ghosts.sendcounts)
    came = exchange_with_neighbors(comm, ghosts.neighbors, sent, ghosts.recvcounts, _TASK)
    sendcounts = tuple(int(part.sum()) for part in sent)
    recvcounts = tuple(int(part.sum()) for part in came)
    columns = exchange_with_neighbors(
        comm, ghosts.neighbors, split_by_counts(b.columns[going], sendcounts), recvcounts, _TASK
    )
    pool_starts = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(b.row_starts), *came]))])
    position = pool_positions(a)
    starts, product_columns, target = multiply_patterns(
        a.row_starts, position, pool_starts, np.concatenate([b.columns, *columns])
    )
    rows = np.repeat(np.arange(a.n_local) + a.offset, np.diff(starts))
    pattern = Pattern.from_coo(rows, product_columns, a.n_local, comm, b.n_local_columns)
    order = None if a.is_ordered else a.order
    return _Product(
        pattern,
        TrilinearContraction.pairs(position, order, pool_starts, target, len(product_columns)),
        None if b.is_ordered else TrilinearContraction.selection(b.order, b.nnz),
        TrilinearContraction.selection(b.order[going], b.nnz),
        ghosts.neighbors,
        sendcounts,
        recvcounts,
    )


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return starts[0], starts[0] + 1, ..., then the integers from starts[1] on, and so on."""
    return np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
