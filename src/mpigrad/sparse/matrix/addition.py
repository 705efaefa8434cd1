"""The sum of two matrices, with the union of their patterns made once for each pair."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from mpigrad.operations.local_programs import as_array
from mpigrad.sparse.matrix.csr import stored_order
from mpigrad.sparse.matrix.multilinear import TrilinearContraction, select
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.matrix.plan_cache import cached_plan

__all__ = ["add", "union"]


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
    return a if a is b else _plan(a, b).pattern


def add(
    a: Pattern, a_values: Any, b: Pattern, b_values: Any, sign: int = 1
) -> tuple[Pattern, jax.Array]:
    """Return A + B, or A - B with sign=-1. Messages are sent to make the plan only."""
    if a is b:
        left, right = as_array(a_values), as_array(b_values)
        return a, left + right if sign > 0 else left - right
    plan = _plan(a, b)
    left, right = select(plan.left, a_values), select(plan.right, b_values)
    return plan.pattern, left + right if sign > 0 else left - right


def _plan(a: Pattern, b: Pattern) -> _Union:
    def check() -> str:
        if (a.n_rows, a.n_columns) != (b.n_rows, b.n_columns):
            return (
                f"the matrices have shapes ({a.n_rows}, {a.n_columns}) and "
                f"({b.n_rows}, {b.n_columns}), but must have the same. Give equal shapes."
            )
        mine, theirs = (a.n_local, a.n_local_columns), (b.n_local, b.n_local_columns)
        if mine != theirs:
            return (
                f"rank {a.comm.rank} owns {mine[0]} rows and {mine[1]} columns of the first matrix "
                f"but {theirs[0]} and {theirs[1]} of the second. Make both with the same stripes."
            )
        return ""

    return cached_plan("A + B", a, b, check, lambda: _make(a, b))


def _make(a: Pattern, b: Pattern) -> _Union:
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
            rows[first] + a.offset, columns[first], a.n_local, a.comm, a.n_local_columns
        )

    def positions(part: Pattern, places: np.ndarray) -> TrilinearContraction:
        sources = np.full(pattern.nnz, -1, np.int64)
        sources[places] = part.order
        return TrilinearContraction.selection(stored_order(pattern, sources), part.nnz)

    return _Union(pattern, positions(a, place[: a.nnz]), positions(b, place[a.nnz :]))
