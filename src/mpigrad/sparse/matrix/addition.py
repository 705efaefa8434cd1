"""The sum of two matrices: the union of their patterns, made once for each pair."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.sparse.matrix.csr import stored_order
from mpigrad.sparse.matrix.multilinear import TrilinearContraction, select
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.matrix.plan_cache import cached_plan

__all__ = ["add", "union"]


@dataclasses.dataclass(frozen=True)
class _Union:
    """A pattern, and where its values stand among those of the two."""

    pattern: Pattern
    left: TrilinearContraction
    right: TrilinearContraction


def union(a: Pattern, b: Pattern) -> Pattern:
    """The pattern of all entries of both (collective where it is not yet known).

    Entries are stored in row order, those of two stencils on one grid as those of a stencil; of one
    pattern with itself it is the pattern.
    """
    return a if a is b else _plan(a, b).pattern


def add(
    a: Pattern, a_values: Any, b: Pattern, b_values: Any, sign: int = 1
) -> tuple[Pattern, jax.Array]:
    """A + B, or A - B with sign=-1: no rank sends anything but to make the plan."""
    if a is b:
        left, right = jnp.asarray(a_values), jnp.asarray(b_values)
        return a, left + right if sign > 0 else left - right
    plan = _plan(a, b)
    left, right = select(plan.left, a_values), select(plan.right, b_values)
    return plan.pattern, left + right if sign > 0 else left - right


def _plan(a: Pattern, b: Pattern) -> _Union:
    def check() -> str:
        if (a.n_rows, a.n_columns) != (b.n_rows, b.n_columns):
            return (
                f"the matrices have shapes ({a.n_rows}, {a.n_columns}) and "
                f"({b.n_rows}, {b.n_columns}), which must be equal"
            )
        mine, theirs = (a.n_local, a.n_local_columns), (b.n_local, b.n_local_columns)
        if mine != theirs:
            return (
                f"rank {a.comm.rank} owns {mine[0]} rows and {mine[1]} columns of the first matrix "
                f"but {theirs[0]} and {theirs[1]} of the second; make both with the same stripes"
            )
        return ""

    return cached_plan("A + B", a, b, check, lambda: _make(a, b))


def _make(a: Pattern, b: Pattern) -> _Union:
    # Entries in row order, those of both patterns beside each other.
    rows, columns = np.concatenate([a.rows, b.rows]), np.concatenate([a.columns, b.columns])
    sorted_ = np.lexsort((columns, rows))
    rows, columns = rows[sorted_], columns[sorted_]
    first = np.ones(len(rows), bool)
    first[1:] = (np.diff(rows) != 0) | (np.diff(columns) != 0)
    place = np.empty(len(rows), np.int64)  # of each entry, those of `a` first, in the union
    place[sorted_] = np.cumsum(first) - 1
    if a.stencil and b.stencil and a.stencil.grid == b.stencil.grid:
        # Of the same entries; solvers for grids find the stencil.
        offsets = dict.fromkeys((*a.stencil.offsets, *b.stencil.offsets))
        pattern = Pattern.from_stencil(a.stencil.grid, list(offsets))
    else:
        pattern = Pattern.from_coo(
            rows[first] + a.offset, columns[first], a.n_local, a.comm, a.n_local_columns
        )

    def positions(part: Pattern, places: np.ndarray) -> TrilinearContraction:
        found = np.full(pattern.nnz, -1, np.int64)
        found[places] = part.order
        return TrilinearContraction.selection(stored_order(pattern, found), part.nnz)

    return _Union(pattern, positions(a, place[: a.nnz]), positions(b, place[a.nnz :]))
