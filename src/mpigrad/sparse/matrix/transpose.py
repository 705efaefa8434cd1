"""The transpose of a distributed matrix, with a plan made once and one message per neighbour."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from mpigrad.operations import neighbor_alltoallv
from mpigrad.operations.local_programs import as_array
from mpigrad.sparse.matrix.csr import pool_positions, stored_order
from mpigrad.sparse.matrix.multilinear import TrilinearContraction, positions, select
from mpigrad.sparse.matrix.neighbor_exchange import exchange_with_neighbors, split_by_counts
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = ["transpose_values", "transposed"]

_TASK = "the making of a transpose"


def transposed(pattern: Pattern) -> Pattern:
    """Return the pattern of the transpose (collective at the first call).

    Its rows are the columns of `pattern`, in the same stripes. Its entries are stored in row order.
    For a stencil it is the stencil of the opposite offsets. The transpose of the transpose is
    `pattern` itself.

    The plan follows the two phases of Xu, Zhu & Darve, "Distributed machine learning for
    computational engineering using MPI" (2020). Once, neighbours send each other the rows and
    columns of the entries. After that, `transpose_values` sends values only.
    """
    return _plan(pattern).pattern


def transpose_values(pattern: Pattern, values: Any) -> jax.Array:
    """Return the values of the transpose, in the order of `transposed(pattern)` (collective).

    Parameters
    ----------
    values
        The stored values of `pattern`, shape (nnz,) or (nnz, ...).

    Returns
    -------
    An array of shape (nnz of the transposed pattern, ...): a permutation over all ranks. Its
    adjoint is the inverse permutation.
    """
    plan, values = _plan(pattern), as_array(values)
    if not plan.neighbors:
        return select(plan.sources, values)
    received = neighbor_alltoallv(
        select(plan.sent, values), plan.neighbors, plan.sendcounts, plan.recvcounts, pattern.comm
    )
    return select(plan.sources, values, received)


@dataclasses.dataclass(frozen=True)
class _Transposition:
    """The plan that moves values from a pattern to its transpose.

    Attributes
    ----------
    pattern
        The transposed pattern.
    neighbors, sendcounts, recvcounts
        The counts of values sent to, and received from, each neighbour.
    send
        The stored positions of the values that are sent, packed by neighbour.
    source
        The position of each value of the transpose among own and received values.
    """

    pattern: Pattern
    neighbors: tuple[int, ...]
    sendcounts: tuple[int, ...]
    recvcounts: tuple[int, ...]
    send: np.ndarray
    source: np.ndarray

    @functools.cached_property
    def sent(self) -> TrilinearContraction:
        return TrilinearContraction.selection(
            self.send, len(self.source) - sum(self.recvcounts) + len(self.send)
        )

    @functools.cached_property
    def sources(self) -> TrilinearContraction:
        return TrilinearContraction.selection(self.source, len(self.source) + len(self.send))

    def back(self, to: Pattern) -> _Transposition:
        """Return the plan from the transpose to the original pattern."""
        where = np.empty(to.nnz + sum(self.recvcounts), np.int32)
        where[self.source] = np.arange(len(self.source))
        source = where[: to.nnz]
        source[self.send] = len(self.source) + np.arange(len(self.send))
        send = where[to.nnz :]
        return _Transposition(to, self.neighbors, self.recvcounts, self.sendcounts, send, source)


def _make(pattern: Pattern) -> _Transposition:
    comm, ghosts, n = pattern.comm, pattern.ghosts, pattern.n_local_columns
    starts, rows, entries = _by_column(pattern)
    own = int(starts[n])
    # Each ghost column's rows go to its owner, in the order of the ghost exchange.
    going = split_by_counts(np.diff(starts[n:]), ghosts.recvcounts)
    coming = exchange_with_neighbors(comm, ghosts.neighbors, going, ghosts.sendcounts, _TASK)
    sendcounts = tuple(int(counts.sum()) for counts in going)
    recvcounts = tuple(int(counts.sum()) for counts in coming)
    leaving = split_by_counts(rows[own:] + pattern.offset, sendcounts)
    foreign = exchange_with_neighbors(comm, ghosts.neighbors, leaving, recvcounts, _TASK)
    columns = split_by_counts(ghosts._send, ghosts.sendcounts)
    numbers = split_by_counts(np.arange(sum(recvcounts)) + pattern.nnz, recvcounts)

    # (rank, columns, entries in each column, their rows, positions of their values). As stripes
    # follow the ranks, the rows of a column are sorted if ranks are taken in order.
    own_sizes = np.diff(starts[: n + 1])
    pieces: list[tuple[Any, ...]] = [
        *zip(ghosts.neighbors, columns, coming, foreign, numbers, strict=True),
        (comm.rank, np.arange(n), own_sizes, rows[:own] + pattern.offset, entries[:own]),
    ]
    sizes = np.zeros(n, np.int64)
    for _, column, counts, _, _ in pieces:
        sizes[column] += counts
    free = np.cumsum(sizes) - sizes  # the next free place of each column
    source, far = np.empty(sizes.sum(), np.int64), np.empty(sizes.sum(), np.int64)
    for _, column, counts, row, number in sorted(pieces, key=lambda piece: piece[0]):
        place = np.repeat(free[column] - np.cumsum(counts) + counts, counts)
        place += np.arange(len(place))
        free[column] += counts
        source[place], far[place] = number, row
    near = np.repeat(np.arange(n) + pattern.column_offset, sizes)
    if pattern.stencil is None:
        result = Pattern.from_coo(near, far, n, comm, pattern.n_local)
    else:  # a stencil seen from the other cell, for the solvers of grids
        offsets = [tuple(-step for step in offset) for offset in pattern.stencil.offsets]
        result = Pattern.from_stencil(pattern.stencil.grid, offsets)
        source = stored_order(result, source)
    sent, source = positions(entries[own:]), positions(source)
    return _Transposition(result, ghosts.neighbors, sendcounts, recvcounts, sent, source)


def _by_column(pattern: Pattern) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return column starts, local rows and positions of the entries, own columns first."""
    shape = (pattern.n_local, pattern.n_local_columns + len(pattern.ghosts.ghosts))
    entries = (pattern.order, pool_positions(pattern), pattern.row_starts)
    import scipy.sparse  # 0.1 s, which a matrix with a stencil does not need

    by_row = scipy.sparse.csr_array(entries, shape=shape)
    by_column = by_row.tocsc()  # a counting sort
    return by_column.indptr.astype(np.int64), by_column.indices, by_column.data


def _plan(pattern: Pattern) -> _Transposition:
    if "transpose" not in pattern.derived:
        original: Pattern | None = pattern.derived.get("transpose of")
        if original is None:
            plan = _make(pattern)
            plan.pattern.derived["transpose of"] = pattern
        else:
            plan = _plan(original).back(original)
        pattern.derived["transpose"] = plan
    return pattern.derived["transpose"]
