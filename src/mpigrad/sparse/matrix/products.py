"""Products, sums and transposes of distributed matrices, with plans made once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mpigrad.extend import as_array
from mpigrad.operations import neighbor_alltoallv
from mpigrad.sparse.matrix.ghost_exchange import (
    exchange_with_neighbors,
    ghost_values,
    split_by_counts,
)
from mpigrad.sparse.matrix.multilinear import (
    TrilinearContraction,
    contract,
    multiply_patterns,
    outer,
    positions,
    select,
)
from mpigrad.sparse.matrix.pattern import Pattern, cached_plan

__all__ = [
    "add",
    "apply",
    "diagonal",
    "gather_by_column",
    "gather_by_row",
    "multiply",
    "multiply_matrices",
    "outer_product",
    "pool_positions",
    "product_pattern",
    "stored_order",
    "transpose_values",
    "transposed",
    "union",
]

# ---- A matrix's rows in the native library: products with vectors, and gathers by row and
# column


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
    if pattern.is_ordered:
        return row_order
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

    def make() -> TrilinearContraction:
        positions = stored_order(pattern, pool_positions(pattern))
        return TrilinearContraction.selection(positions, _n_local_and_ghost(pattern))

    columns = _cached(pattern, "gather by column", make)
    return select(columns, d, ghost_values(pattern.ghosts, d))


def outer_product(pattern: Pattern, y: jax.Array, x: jax.Array) -> jax.Array:
    """Return y_i x_j for each stored entry: (n_local,), (n_own + n_ghosts,) -> (nnz,)."""
    return outer(_matrix(pattern), x, y)


def diagonal(pattern: Pattern, values: jax.Array) -> jax.Array:
    """Return the diagonal entries of this rank's rows, zero in rows without one."""

    def make() -> TrilinearContraction:
        return TrilinearContraction.selection(pattern.diagonal, pattern.nnz)

    return select(_cached(pattern, "diagonal", make), values)


# ---- The sum of two matrices, with the union of their patterns made once for each pair ----


@dataclasses.dataclass(frozen=True)
class _Union:
    """The union's pattern, and the maps from the values of both patterns to its values."""

    pattern: Pattern
    left: TrilinearContraction
    right: TrilinearContraction


def union(a: Pattern, b: Pattern) -> Pattern:
    """Return the pattern of the entries of both (collective at the first call).

    Entries are stored in row order. The union of two stencils on one grid is a stencil. The union
    of a pattern with itself is the pattern.
    """
    return a if a is b else _plan_sum(a, b).pattern


def add(
    a: Pattern, a_values: Any, b: Pattern, b_values: Any, sign: int = 1
) -> tuple[Pattern, jax.Array]:
    """Return A + B, or A - B with sign=-1. Messages are sent to make the plan only."""
    if a is b:
        left, right = as_array(a_values), as_array(b_values)
        return a, left + right if sign > 0 else left - right
    plan = _plan_sum(a, b)
    left, right = select(plan.left, a_values), select(plan.right, b_values)
    return plan.pattern, left + right if sign > 0 else left - right


def _plan_sum(a: Pattern, b: Pattern) -> _Union:
    def check() -> str:
        if (a.n_rows, a.n_columns) != (b.n_rows, b.n_columns):
            return (
                f"the matrices have shapes ({a.n_rows}, {a.n_columns}) and "
                f"({b.n_rows}, {b.n_columns}), but must have the same. Give equal shapes."
            )
        sizes_a, sizes_b = (a.n_local, a.n_local_columns), (b.n_local, b.n_local_columns)
        if sizes_a != sizes_b:
            return (
                f"rank {a.comm.rank} owns {sizes_a[0]} rows and {sizes_a[1]} columns of the first "
                f"matrix but {sizes_b[0]} and {sizes_b[1]} of the second. Make both with the same "
                "stripes."
            )
        return ""

    return cached_plan("A + B", a, b, check, lambda: _make_sum(a, b))


def _make_sum(a: Pattern, b: Pattern) -> _Union:
    # The entries of both patterns in row order: equal entries follow each other.
    rows, columns = np.concatenate([a.rows, b.rows]), np.concatenate([a.columns, b.columns])
    sorted_ = np.lexsort((columns, rows))
    rows, columns = rows[sorted_], columns[sorted_]
    first = np.ones(len(rows), bool)
    first[1:] = (np.diff(rows) != 0) | (np.diff(columns) != 0)
    place = np.empty(len(rows), np.int64)  # each entry's place in the union, those of `a` first
    place[sorted_] = np.cumsum(first) - 1
    if a.stencil and b.stencil and a.stencil.grid == b.stencil.grid:
        # The same entries, as a stencil for the solvers of grids.
        offsets = dict.fromkeys((*a.stencil.offsets, *b.stencil.offsets))
        pattern = Pattern.from_stencil(a.stencil.grid, list(offsets))
    else:
        pattern = Pattern.from_coo(
            rows[first] + a.offset,
            columns[first],
            a.n_local,
            a.comm,
            n_local_columns=a.n_local_columns,
        )

    def positions(part: Pattern, places: np.ndarray) -> TrilinearContraction:
        sources = np.full(pattern.nnz, -1, np.int64)
        sources[places] = part.order
        return TrilinearContraction.selection(stored_order(pattern, sources), part.nnz)

    return _Union(pattern, positions(a, place[: a.nnz]), positions(b, place[a.nnz :]))


# ---- The product of two matrices, with its pattern and row exchange made once for each pair ----


_PRODUCT_TASK = "the making of a product's pattern"


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
    return _plan_product(a, b).pattern


def multiply_matrices(
    a: Pattern, a_values: Any, b: Pattern, b_values: Any
) -> tuple[Pattern, jax.Array]:
    """A B (collective): one message to each neighbour, then a multiplication for each meeting.

    Entry (i, k) of A meets the entries (k, j) of B. For rows k of other ranks, values come by one
    message from each neighbour.
    """
    plan = _plan_product(a, b)
    local_values = b_values if plan.row_order is None else select(plan.row_order, b_values)
    rest = None
    if plan.neighbors:
        rest = neighbor_alltoallv(
            select(plan.send, b_values), plan.neighbors, plan.sendcounts, plan.recvcounts, a.comm
        )
    return plan.pattern, contract(plan.pairs, a_values, local_values, rest)


def _plan_product(a: Pattern, b: Pattern) -> _Product:
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

    return cached_plan("A @ B", a, b, check, lambda: _make_product(a, b))


def _make_product(a: Pattern, b: Pattern) -> _Product:
    comm, ghosts = a.comm, a.ghosts
    # The ranks that read this rank's entries of x in A x read its rows of B.
    sizes = np.diff(b.row_starts)[ghosts._send]
    going = _ranges(b.row_starts[:-1][ghosts._send], sizes)
    sent = split_by_counts(sizes, ghosts.sendcounts)
    came = exchange_with_neighbors(comm, ghosts.neighbors, sent, ghosts.recvcounts, _PRODUCT_TASK)
    sendcounts = tuple(int(part.sum()) for part in sent)
    recvcounts = tuple(int(part.sum()) for part in came)
    columns = exchange_with_neighbors(
        comm,
        ghosts.neighbors,
        split_by_counts(b.columns[going], sendcounts),
        recvcounts,
        _PRODUCT_TASK,
    )
    pool_starts = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(b.row_starts), *came]))])
    position = pool_positions(a)
    starts, product_columns, target = multiply_patterns(
        a.row_starts, position, pool_starts, np.concatenate([b.columns, *columns])
    )
    rows = np.repeat(np.arange(a.n_local) + a.offset, np.diff(starts))
    pattern = Pattern.from_coo(
        rows, product_columns, a.n_local, comm, n_local_columns=b.n_local_columns
    )
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


# ---- The transpose of a distributed matrix, with a plan made once and one message per
# neighbour


_TRANSPOSE_TASK = "the making of a transpose"


def transposed(pattern: Pattern) -> Pattern:
    """Return the pattern of the transpose (collective at the first call).

    Its rows are the columns of `pattern`, in the same stripes. Its entries are stored in row order.
    For a stencil it is the stencil of the opposite offsets. The transpose of the transpose is
    `pattern` itself.

    The plan follows the two phases of Xu, Zhu & Darve, "Distributed machine learning for
    computational engineering using MPI" (2020). Once, neighbours send each other the rows and
    columns of the entries. After that, `transpose_values` sends values only.
    """
    return _plan_transpose(pattern).pattern


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
    plan, values = _plan_transpose(pattern), as_array(values)
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


def _make_transpose(pattern: Pattern) -> _Transposition:
    comm, ghosts, n = pattern.comm, pattern.ghosts, pattern.n_local_columns
    starts, rows, entries = _by_column(pattern)
    end = int(starts[n])
    # Each ghost column's rows go to its owner, in the order of the ghost exchange.
    going = split_by_counts(np.diff(starts[n:]), ghosts.recvcounts)
    coming = exchange_with_neighbors(
        comm, ghosts.neighbors, going, ghosts.sendcounts, _TRANSPOSE_TASK
    )
    sendcounts = tuple(int(counts.sum()) for counts in going)
    recvcounts = tuple(int(counts.sum()) for counts in coming)
    leaving = split_by_counts(rows[end:] + pattern.offset, sendcounts)
    foreign = exchange_with_neighbors(comm, ghosts.neighbors, leaving, recvcounts, _TRANSPOSE_TASK)
    columns = split_by_counts(ghosts._send, ghosts.sendcounts)
    numbers = split_by_counts(np.arange(sum(recvcounts)) + pattern.nnz, recvcounts)

    # (rank, columns, entries in each column, their rows, positions of their values). As stripes
    # follow the ranks, the rows of a column are sorted if ranks are taken in order.
    own_sizes = np.diff(starts[: n + 1])
    pieces: list[tuple[Any, ...]] = [
        *zip(ghosts.neighbors, columns, coming, foreign, numbers, strict=True),
        (comm.rank, np.arange(n), own_sizes, rows[:end] + pattern.offset, entries[:end]),
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
        result = Pattern.from_coo(near, far, n, comm, n_local_columns=pattern.n_local)
    else:  # a stencil seen from the other cell, for the solvers of grids
        offsets = [tuple(-step for step in offset) for offset in pattern.stencil.offsets]
        result = Pattern.from_stencil(pattern.stencil.grid, offsets)
        source = stored_order(result, source)
    sent, source = positions(entries[end:]), positions(source)
    return _Transposition(result, ghosts.neighbors, sendcounts, recvcounts, sent, source)


def _by_column(pattern: Pattern) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return column starts, local rows and positions of the entries, own columns first."""
    shape = (pattern.n_local, pattern.n_local_columns + len(pattern.ghosts.ghosts))
    entries = (pattern.order, pool_positions(pattern), pattern.row_starts)
    import scipy.sparse  # 0.1 s, which a matrix with a stencil does not need

    by_row = scipy.sparse.csr_array(entries, shape=shape)
    by_column = by_row.tocsc()  # a counting sort
    return by_column.indptr.astype(np.int64), by_column.indices, by_column.data


def _plan_transpose(pattern: Pattern) -> _Transposition:
    if "transpose" not in pattern.derived:
        original: Pattern | None = pattern.derived.get("transpose of")
        if original is None:
            plan = _make_transpose(pattern)
            plan.pattern.fields = pattern.fields
            plan.pattern.derived["transpose of"] = pattern
        else:
            plan = _plan_transpose(original).back(original)
        pattern.derived["transpose"] = plan
    return pattern.derived["transpose"]
