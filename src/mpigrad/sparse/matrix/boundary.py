"""Dirichlet conditions: rows of a linear system are replaced by prescribed values."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.operations import allreduce, require
from mpigrad.operations.local_programs import as_array, jit_local
from mpigrad.sparse.matrix.csr import apply, gather_by_row, select_columns
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = ["eliminate_rows", "fix_rows"]


def fix_rows(pattern: Pattern, values: jax.Array, fixed: Any) -> jax.Array:
    """Return the values with fixed rows of the identity (`Matrix.at_boundary`)."""
    fixed = _check_fixed(pattern, fixed)
    return _with_ones(values, _in_fixed_rows(pattern, fixed), None, fixed, *_diagonal(pattern))


def eliminate_rows(
    pattern: Pattern, values: jax.Array, fixed: Any, b: Any, solution: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Return values and right-hand side without fixed rows and columns (`Matrix.at_boundary`)."""
    fixed = _check_fixed(pattern, fixed)
    n, rank = pattern.n_local, pattern.comm.rank
    b = as_array(b)
    if b.ndim not in (1, 2) or b.shape[0] != n:
        raise ValueError(
            f"at_boundary: b has shape {b.shape} on rank {rank}, which owns {n} rows. Give shape "
            f"({n},) or ({n}, k)."
        )
    dtype = jnp.result_type(values, b, 0.0 if solution is None else solution)
    prescribed = as_array(0 if solution is None else solution, dtype)
    if prescribed.ndim not in (0, b.ndim) or prescribed.shape not in ((), b.shape):
        raise ValueError(
            f"at_boundary: values have shape {prescribed.shape} on rank {rank}, and b has "
            f"{b.shape}. Give a scalar or one value for each entry of b (read in fixed rows only)."
        )
    # One message has the fixed columns and their values.
    own = _fixed_and_prescribed(fixed, prescribed, shape=b.shape)
    fixed_columns, known = _divided(pattern.ghosts.local_and_ghost(own))
    eliminated = apply(pattern, values.astype(dtype), known)
    in_row, in_column = _in_fixed_rows(pattern, fixed), select_columns(pattern, fixed_columns)
    entries = _with_ones(values, in_row, in_column, fixed, *_diagonal(pattern))
    return entries, _without_fixed(fixed, own, b, eliminated)


@jit_local(static_argnames=("shape",))
def _fixed_and_prescribed(
    fixed: jax.Array, prescribed: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Return 1 in fixed rows, and the prescribed values, as columns that are 0 in other rows."""
    rows = fixed.reshape(shape[0], *[1] * (len(shape) - 1))
    known = jnp.where(rows, prescribed, jnp.zeros(shape, prescribed.dtype))
    known = known.reshape(shape[0], math.prod(shape[1:]))
    return jnp.concatenate([fixed[:, None].astype(prescribed.dtype), known], axis=1)


@jit_local
def _divided(columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    return columns[:, 0], columns[:, 1:]


@jit_local
def _without_fixed(
    fixed: jax.Array, own: jax.Array, b: jax.Array, eliminated: jax.Array
) -> jax.Array:
    rows = fixed.reshape(len(b), *[1] * (b.ndim - 1))
    return jnp.where(rows, own[:, 1:].reshape(b.shape), b - eliminated.reshape(b.shape))


def _in_fixed_rows(pattern: Pattern, fixed: jax.Array) -> jax.Array:
    """Return 1 for each stored entry of a fixed row, and 0 for the others.

    XLA would compute a gather of a mask that is a constant when it compiles, for seconds.
    """
    return gather_by_row(pattern, fixed.astype(jnp.float32))


def _check_fixed(pattern: Pattern, fixed: Any) -> jax.Array:
    n, rank = pattern.n_local, pattern.comm.rank
    fixed = as_array(fixed)
    if not pattern.is_square:
        shape = (pattern.n_rows, pattern.n_columns)
        raise ValueError(
            f"at_boundary: the matrix must be square, got shape {shape}. Make it without "
            "n_local_columns."
        )
    if fixed.shape != (n,) or fixed.dtype != bool:
        raise ValueError(
            f"at_boundary: fixed has shape {fixed.shape} and dtype {fixed.dtype} on rank {rank}. "
            f"Give a boolean for each of its {n} rows: shape ({n},)."
        )
    _require_diagonal(pattern, fixed)
    return fixed


def _diagonal(pattern: Pattern) -> tuple[jax.Array, int]:
    return pattern.diagonal_index, pattern.nnz


@jit_local(static_argnames=("nnz",))
def _with_ones(
    values: jax.Array,
    in_row: jax.Array,
    in_column: jax.Array | None,
    fixed: jax.Array,
    diagonal: jax.Array,
    nnz: int,
) -> jax.Array:
    """Return zeros in fixed rows and columns, and ones on their diagonal."""
    cleared = in_row != 0 if in_column is None else (in_row != 0) | (in_column != 0)
    # A fixed row without a stored diagonal is an error before: -1 is for rows that are not fixed.
    return jnp.where(cleared, 0, values).at[jnp.where(fixed, diagonal, nnz)].set(1, mode="drop")


def _require_diagonal(pattern: Pattern, fixed: jax.Array) -> None:
    """Raise an error on all ranks if a fixed row lacks the diagonal entry."""
    if pattern.row_without_diagonal < 0:
        return
    bare = allreduce(jnp.sum(fixed & (pattern.diagonal_index < 0)), comm=pattern.comm)
    require(
        bare == 0,
        "at_boundary: {} of the fixed rows have no diagonal entry in the pattern. Add the entry "
        "(i, i) for every fixed row i.",
        bare,
        comm=pattern.comm,
    )
