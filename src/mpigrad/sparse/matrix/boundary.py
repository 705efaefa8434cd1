"""Dirichlet conditions: rows of a linear system are replaced by prescribed values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.operations import allreduce, require
from mpigrad.sparse.matrix.csr import apply, gather_by_row, select_columns
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = ["eliminate_rows", "fix_rows"]


def fix_rows(pattern: Pattern, values: jax.Array, fixed: Any) -> jax.Array:
    """Return the values with fixed rows of the identity (`Matrix.at_boundary`)."""
    fixed = _check_fixed(pattern, fixed)
    in_row = _in_fixed_rows(pattern, fixed)
    return _with_ones(values, in_row, _diagonal(pattern, fixed))


def eliminate_rows(
    pattern: Pattern, values: jax.Array, fixed: Any, b: Any, solution: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Return values and right-hand side without fixed rows and columns (`Matrix.at_boundary`)."""
    fixed = _check_fixed(pattern, fixed)
    n, rank = pattern.n_local, pattern.comm.rank
    in_row = _in_fixed_rows(pattern, fixed)
    diagonal = _diagonal(pattern, fixed)
    b = jnp.asarray(b)
    if b.ndim not in (1, 2) or b.shape[0] != n:
        raise ValueError(
            f"at_boundary: b has shape {b.shape} on rank {rank}, which owns {n} rows. Give shape "
            f"({n},) or ({n}, k)."
        )
    dtype = jnp.result_type(values, b, 0.0 if solution is None else solution)
    prescribed = jnp.asarray(0 if solution is None else solution, dtype)
    if prescribed.ndim not in (0, b.ndim) or prescribed.shape not in ((), b.shape):
        raise ValueError(
            f"at_boundary: values have shape {prescribed.shape} on rank {rank}, and b has "
            f"{b.shape}. Give a scalar or one value for each entry of b (read in fixed rows only)."
        )
    rows = fixed.reshape(n, *[1] * (b.ndim - 1))
    prescribed = jnp.where(rows, prescribed, jnp.zeros(b.shape, dtype))
    # One message has the fixed columns and their values.
    all_columns = pattern.ghosts.local_and_ghost(
        jnp.concatenate(
            [fixed[:, None].astype(dtype), prescribed if b.ndim == 2 else prescribed[:, None]],
            axis=1,
        )
    )
    eliminated = apply(pattern, values.astype(dtype), all_columns[:, 1:]).reshape(b.shape)
    in_column = select_columns(pattern, all_columns[:, 0]) != 0
    entries = _with_ones(values, in_row | in_column, diagonal)
    return entries, jnp.where(rows, prescribed, b - eliminated)


def _in_fixed_rows(pattern: Pattern, fixed: jax.Array) -> jax.Array:
    """Return True for each stored entry of a fixed row.

    XLA would compute a gather of a mask that is a constant when it compiles, for seconds.
    """
    return gather_by_row(pattern, fixed.astype(jnp.float32)) != 0


def _check_fixed(pattern: Pattern, fixed: Any) -> jax.Array:
    n, rank = pattern.n_local, pattern.comm.rank
    fixed = jnp.asarray(fixed)
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


def _diagonal(pattern: Pattern, fixed: jax.Array) -> jax.Array:
    # A fixed row without a stored diagonal is an error before: -1 is for rows that are not fixed.
    return jnp.where(fixed, pattern.diagonal_index, pattern.nnz)


def _with_ones(values: jax.Array, cleared: jax.Array, diagonal: jax.Array) -> jax.Array:
    return jnp.where(cleared, 0, values).at[diagonal].set(1, mode="drop")


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
