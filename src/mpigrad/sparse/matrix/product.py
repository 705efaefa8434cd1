"""The product of two matrices: its pattern and the exchange of rows, made once for each pair."""

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

_WHAT = "the making of a product's pattern"


@dataclasses.dataclass(frozen=True)
class _Product:
    """What A B needs of its two patterns.

    Attributes
    ----------
    pattern
        That of the product.
    pairs
        Which values of A and B meet, and where their product goes.
    row_order
        Own values of B in row order; None where they are stored so.
    send, neighbors, sendcounts, recvcounts
        Values of those rows of B that the neighbours read, packed by neighbour.
    """

    pattern: Pattern
    pairs: TrilinearContraction
    row_order: TrilinearContraction | None
    send: TrilinearContraction
    neighbors: tuple[int, ...]
    sendcounts: tuple[int, ...]
    recvcounts: tuple[int, ...]


def product_pattern(a: Pattern, b: Pattern) -> Pattern:
    """The pattern of A B (collective where it is not yet known), stored in row order."""
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
                f"({b.n_rows}, {b.n_columns}); the first must have as many columns as the second "
                "has rows"
            )
        if a.n_local_columns != b.n_local:
            return (
                f"rank {a.comm.rank} owns {a.n_local_columns} columns of the first matrix but "
                f"{b.n_local} rows of the second; make them with the same stripes"
            )
        return ""

    return cached_plan("A @ B", a, b, check, lambda: _make(a, b))


def _make(a: Pattern, b: Pattern) -> _Product:
    comm, ghosts = a.comm, a.ghosts
    # Who reads my entries of a vector x in A x reads my rows of B.
    sizes = np.diff(b.row_starts)[ghosts._send]
    going = _ranges(b.row_starts[:-1][ghosts._send], sizes)
    sent = split_by_counts(sizes, ghosts.sendcounts)
    came = exchange_with_neighbors(comm, ghosts.neighbors, sent, ghosts.recvcounts, _WHAT)
    sendcounts = tuple(int(part.sum()) for part in sent)
    recvcounts = tuple(int(part.sum()) for part in came)
    columns = exchange_with_neighbors(
        comm, ghosts.neighbors, split_by_counts(b.columns[going], sendcounts), recvcounts, _WHAT
    )
    pool_starts = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(b.row_starts), *came]))])
    position = pool_positions(a)
    starts, found, target = multiply_patterns(
        a.row_starts, position, pool_starts, np.concatenate([b.columns, *columns])
    )
    rows = np.repeat(np.arange(a.n_local) + a.offset, np.diff(starts))
    pattern = Pattern.from_coo(rows, found, a.n_local, comm, b.n_local_columns)
    order = None if a.is_ordered else a.order
    return _Product(
        pattern,
        TrilinearContraction.pairs(position, order, pool_starts, target, len(found)),
        None if b.is_ordered else TrilinearContraction.selection(b.order, b.nnz),
        TrilinearContraction.selection(b.order[going], b.nnz),
        ghosts.neighbors,
        sendcounts,
        recvcounts,
    )


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ..., then those from starts[1], and so on."""
    return np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
