"""Rows of a linear system replaced by prescribed values: Dirichlet conditions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.operations import allreduce, require
from mpigrad.operations.indexing import take
from mpigrad.sparse.matrix.csr import apply
from mpigrad.sparse.matrix.pattern import Pattern

__all__ = ["eliminate_rows", "fix_rows"]


def fix_rows(pattern: Pattern, values: jax.Array, fixed: Any) -> jax.Array:
    """Return the values with the rows of the identity where `fixed`: see `Matrix.at_boundary`."""
    fixed = _check_fixed(pattern, fixed)
    in_row = take(fixed, pattern.row_index)
    return _with_ones(values, in_row, _diagonal(pattern, fixed))


def eliminate_rows(
    pattern: Pattern, values: jax.Array, fixed: Any, b: Any, solution: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Return values and right-hand side without fixed rows and columns (`Matrix.at_boundary`)."""
    fixed = _check_fixed(pattern, fixed)
    n, rank = pattern.n_local, pattern.comm.rank
    in_row = take(fixed, pattern.row_index)
    diagonal = _diagonal(pattern, fixed)
    b = jnp.asarray(b)
    if b.ndim not in (1, 2) or b.shape[0] != n:
        raise ValueError(
            f"at_boundary: b has shape {b.shape} on rank {rank}, which owns {n} rows; give "
            f"({n},) or ({n}, k)"
        )
    dtype = jnp.result_type(values, b, 0.0 if solution is None else solution)
    prescribed = jnp.asarray(0 if solution is None else solution, dtype)
    if prescribed.ndim not in (0, b.ndim) or prescribed.shape not in ((), b.shape):
        raise ValueError(
            f"at_boundary: values have shape {prescribed.shape} on rank {rank}, and b has "
            f"{b.shape}; give a scalar or one value for each of b (read in fixed rows alone)"
        )
    rows = fixed.reshape(n, *[1] * (b.ndim - 1))
    prescribed = jnp.where(rows, prescribed, jnp.zeros(b.shape, dtype))
    # One message carries which columns are fixed, and their values.
    pool = pattern.ghosts.local_and_ghost(
        jnp.concatenate(
            [fixed[:, None].astype(dtype), prescribed if b.ndim == 2 else prescribed[:, None]],
            axis=1,
        )
    )
    known = apply(pattern, values.astype(dtype), pool[:, 1:]).reshape(b.shape)
    in_column = take(pool[:, 0] != 0, pattern.ghosts.position)
    entries = _with_ones(values, in_row | in_column, diagonal)
    return entries, jnp.where(rows, prescribed, b - known)


def _check_fixed(pattern: Pattern, fixed: Any) -> jax.Array:
    n, rank = pattern.n_local, pattern.comm.rank
    fixed = jnp.asarray(fixed)
    if not pattern.is_square:
        shape = (pattern.n_rows, pattern.n_columns)
        raise ValueError(f"at_boundary: the matrix is not square, but of shape {shape}")
    if fixed.shape != (n,) or fixed.dtype != bool:
        raise ValueError(
            f"at_boundary: fixed has shape {fixed.shape} and dtype {fixed.dtype} on rank {rank}; "
            f"give a boolean for each of its {n} rows: shape ({n},)"
        )
    _require_diagonal(pattern, fixed)
    return fixed


def _diagonal(pattern: Pattern, fixed: jax.Array) -> jax.Array:
    # A fixed row without a stored diagonal has been refused: -1 is for rows that are not fixed.
    return jnp.where(fixed, pattern.diagonal_index, pattern.nnz)


def _with_ones(values: jax.Array, cleared: jax.Array, diagonal: jax.Array) -> jax.Array:
    return jnp.where(cleared, 0, values).at[diagonal].set(1, mode="drop")


def _require_diagonal(pattern: Pattern, fixed: jax.Array) -> None:
    """End, on all ranks, where a fixed row has no diagonal entry to put the one in."""
    if pattern.row_without_diagonal < 0:
        return
    bare = allreduce(jnp.sum(fixed & (pattern.diagonal_index < 0)), comm=pattern.comm)
    require(
        bare == 0,
        "at_boundary: {} of the fixed rows have no diagonal entry in the pattern; add the entry "
        "(i, i) for every fixed row i",
        bare,
        comm=pattern.comm,
    )
