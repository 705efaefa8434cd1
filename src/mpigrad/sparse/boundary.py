"""Rows of a linear system replaced by prescribed values: Dirichlet conditions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.operations import allreduce, require
from mpigrad.selection import take
from mpigrad.sparse.matrix import Matrix, apply
from mpigrad.sparse.pattern import Pattern

__all__ = ["at_boundary"]


def at_boundary(A: Matrix, fixed: Any, b: Any = None, values: Any = None) -> Any:
    """Prescribe the solution in some rows; see `Matrix.at_boundary`."""
    pattern = A.pattern
    n, rank = pattern.n_local, pattern.comm.rank
    fixed = jnp.asarray(fixed)
    if not pattern.is_square:
        raise ValueError(f"at_boundary: the matrix is not square, but of shape {A.shape}")
    if fixed.shape != (n,) or fixed.dtype != bool:
        raise ValueError(
            f"at_boundary: fixed has shape {fixed.shape} and dtype {fixed.dtype} on rank {rank}; "
            f"give a boolean for each of its {n} rows: shape ({n},)"
        )
    if b is None and values is not None:
        raise ValueError("at_boundary: values are given without b; give both, or set b yourself")
    _require_diagonal(pattern, fixed)
    in_row = take(fixed, pattern.row_index)
    # A fixed row without a stored diagonal has been refused: -1 is for rows that are not fixed.
    diagonal = jnp.where(fixed, pattern.diagonal_index, pattern.nnz)
    if b is None:
        return Matrix(pattern, _with_ones(A.values, in_row, diagonal))

    b = jnp.asarray(b)
    if b.ndim not in (1, 2) or b.shape[0] != n:
        raise ValueError(
            f"at_boundary: b has shape {b.shape} on rank {rank}, which owns {n} rows; give "
            f"({n},) or ({n}, k)"
        )
    dtype = jnp.result_type(A.values, b, 0.0 if values is None else values)
    prescribed = jnp.asarray(0 if values is None else values, dtype)
    if prescribed.ndim not in (0, b.ndim) or prescribed.shape not in ((), b.shape):
        raise ValueError(
            f"at_boundary: values have shape {prescribed.shape} on rank {rank}, and b has "
            f"{b.shape}; give a scalar or one value for each of b (read in fixed rows alone)"
        )
    rows = fixed.reshape(n, *[1] * (b.ndim - 1))
    prescribed = jnp.where(rows, prescribed, jnp.zeros(b.shape, dtype))
    # One message carries which columns are fixed, and their values.
    pool = pattern.ghosts.pool(
        jnp.concatenate(
            [fixed[:, None].astype(dtype), prescribed if b.ndim == 2 else prescribed[:, None]],
            axis=1,
        )
    )
    known = apply(pattern, A.values.astype(dtype), pool[:, 1:]).reshape(b.shape)
    in_column = take(pool[:, 0] != 0, pattern.ghosts.position)
    matrix = Matrix(pattern, _with_ones(A.values, in_row | in_column, diagonal))
    return matrix, jnp.where(rows, prescribed, b - known)


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
