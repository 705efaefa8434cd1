"""Solves with matrices by iterations written in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.runtime.call_sites import describe
from mpigrad.sparse.matrix.matrix import Matrix
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.base import LinearSolver
from mpigrad.sparse.solvers.krylov.errors import require_success
from mpigrad.sparse.solvers.krylov.iteration import solve_system
from mpigrad.sparse.solvers.krylov.system import LinearSystem

__all__ = ["run"]


def run(
    solver: LinearSolver,
    pattern: Pattern,
    values: jax.Array,
    b: jax.Array,
    x0: jax.Array,
    *,
    throw: bool,
    site: int,
) -> tuple[jax.Array, jax.Array]:
    """Solve for each right-hand side in turn, by `LinearSolver.iterate`.

    Parameters
    ----------
    values
        Shape (1, nnz), or (B, nnz) if each right-hand side has a matrix of its own.
    b
        Shape (B, n_local).
    x0
        The first guesses, shape (B, n_local), or (B, 0) for zeros.

    Returns
    -------
    x of shape (B, n_local), and the info of shape (B, INFO).
    """
    n = b.shape[0]
    if x0.shape != b.shape:
        x0 = jnp.zeros_like(b)

    def one(k: Any) -> tuple[jax.Array, jax.Array]:
        matrix = Matrix(pattern, values[k if values.shape[0] > 1 else 0])
        x, info = solve_system(solver, _system(solver, matrix, b[k], x0[k]))
        if throw:
            require_success(solver, info, pattern.comm, f"solve, {describe(site)}: ")
        return x, info

    if n == 1:
        x, info = one(0)
        return x[None], info[None]
    return jax.lax.map(one, jnp.arange(n))


def _system(solver: LinearSolver, matrix: Matrix, b: jax.Array, x0: jax.Array) -> LinearSystem:
    pattern, diagonal = matrix.pattern, matrix.diagonal()
    scale = jnp.where(diagonal.real > 0, jnp.abs(jnp.where(diagonal == 0, 1, diagonal)) ** -0.5, 1)
    real = jnp.issubdtype(diagonal.dtype, jnp.floating)
    return LinearSystem(
        product=lambda v: matrix @ v,
        precondition=_inverse(solver, matrix),
        b=b,
        x0=x0,
        rtol=solver.rtol,
        max_steps=solver.max_steps,
        comm=pattern.comm,
        first=pattern.offset,
        wrong=~jnp.isfinite(matrix.values).all(),
        negative=(diagonal <= 0).any() if solver.needs_positive_definite and real else False,
        scale=scale if solver.symmetric else 1.0,
    )


def _inverse(solver: LinearSolver, matrix: Matrix) -> Callable[[jax.Array], jax.Array]:
    """Return the preconditioner as a function that checks its result."""
    preconditioner = solver.preconditioner
    if preconditioner is None:
        return lambda r: r
    name = type(preconditioner).__name__
    inverse = preconditioner.inverse(matrix)
    if not callable(inverse):
        raise TypeError(
            f"solve: {name}.inverse must return a function r -> z, got "
            f"{type(inverse).__name__}. Return the function that applies the preconditioner."
        )

    def checked(r: jax.Array) -> jax.Array:
        z = jnp.asarray(inverse(r))
        if z.shape != r.shape or z.dtype != r.dtype:
            raise ValueError(
                f"solve: the function of {name}.inverse must return an array like its argument, "
                f"{r.dtype}{list(r.shape)}, got {z.dtype}{list(z.shape)} on rank "
                f"{matrix.pattern.comm.rank}. Return this rank's part of the vector."
            )
        return z

    return checked
