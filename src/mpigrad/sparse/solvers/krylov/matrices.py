"""Solves with matrices by the own Krylov methods."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.runtime.call_sites import describe
from mpigrad.sparse.matrix.matrix import Matrix
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.base import LinearSolver
from mpigrad.sparse.solvers.krylov.errors import require_success
from mpigrad.sparse.solvers.krylov.iteration import iterate
from mpigrad.sparse.solvers.krylov.system import System
from mpigrad.sparse.solvers.preconditioners import Jacobi

__all__ = ["check", "run"]


def check(method: LinearSolver, dtype: Any) -> None:
    """Raise if the own methods cannot solve in such a dtype."""
    kinds = jnp.floating if method.symmetric else jnp.inexact
    if not jnp.issubdtype(dtype, kinds):
        raise TypeError(
            f"mpigrad.sparse.{type(method).__name__} solves real systems, not {dtype}; "
            "take GMRES or BiCGStab, which solve complex ones"
        )


def run(
    method: LinearSolver,
    pattern: Pattern,
    values: jax.Array,
    b: jax.Array,
    x0: jax.Array,
    known: jax.Array,
    *,
    throw: bool,
    site: int,
) -> tuple[jax.Array, jax.Array]:
    """`LinearSolver.run` by mpigrad's own iterations, with Jacobi's preconditioner or none."""
    n = b.shape[0]
    if x0.shape != b.shape:
        x0 = jnp.zeros_like(b)

    def one(k: Any) -> tuple[jax.Array, jax.Array]:
        matrix = Matrix(pattern, values[k if values.shape[0] > 1 else 0])
        x, info = iterate(method, _system(method, matrix, b[k], x0[k]))
        if throw:
            require_success(method, info, pattern.comm, f"solve, {describe(site)}: ")
        return x, info

    if n == 1:
        x, info = one(0)
        return x[None], info[None]
    return jax.lax.map(one, jnp.arange(n))


def _system(method: LinearSolver, matrix: Matrix, b: jax.Array, x0: jax.Array) -> System:
    pattern, diagonal = matrix.pattern, matrix.diagonal()
    scaled = isinstance(method.preconditioner, Jacobi)
    # A row without a diagonal entry, or with a zero there, is left as it is.
    scale = jnp.where(diagonal == 0, 1, diagonal)
    return System(
        product=lambda v: matrix @ v,
        precondition=(lambda v: v / scale) if scaled else lambda v: v,
        b=b,
        x0=x0,
        rtol=method.rtol,
        max_steps=method.max_steps,
        comm=pattern.comm,
        first=pattern.offset,
        wrong=~jnp.isfinite(matrix.values).all(),
        negative=(diagonal <= 0).any() if method.symmetric else False,
        scale=jnp.where(diagonal.real > 0, jnp.abs(scale) ** -0.5, 1) if method.symmetric else 1.0,
    )
