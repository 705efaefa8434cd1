"""Conjugate gradients written in JAX: for any matrix, any floating-point type, without hypre."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.operations import allreduce, require
from mpigrad.operations.sites import describe
from mpigrad.sparse.matrix import apply, diagonal
from mpigrad.sparse.pattern import Pattern
from mpigrad.sparse.strategy import LinearSolver, Result, check_steps

__all__ = ["CG", "Jacobi"]


@dataclasses.dataclass(frozen=True)
class Jacobi:
    """The inverse of the matrix's diagonal, as a preconditioner."""


@dataclasses.dataclass(frozen=True)
class CG(LinearSolver):
    """Conjugate gradients with Jacobi's preconditioner.

    Needs no library besides mpigrad, but its iterations grow with the number of rows along a side
    of the grid, where those of `PCG` with multigrid hardly do.

    Attributes
    ----------
    rtol
        Stop when the two-norm of the residual is below this part of the right-hand side's.
    max_steps
        Most iterations.
    """

    rtol: float = 1e-8
    max_steps: int = 10_000
    preconditioner: Jacobi = Jacobi()

    def __post_init__(self) -> None:
        check_steps("CG", self.rtol, self.max_steps)
        if not isinstance(self.preconditioner, Jacobi):
            raise TypeError(
                f"CG: the preconditioner must be Jacobi(), not {self.preconditioner!r}; "
                "for multigrid write mpigrad.sparse.PCG(preconditioner=BoomerAMG())"
            )

    def check(self, pattern: Pattern, dtype: Any) -> None:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"mpigrad.sparse.CG solves real systems, not {dtype}; "
                "write a complex system as a real one of twice the size"
            )

    def run(
        self, pattern: Pattern, values: jax.Array, b: jax.Array, *, throw: bool, site: int
    ) -> tuple[jax.Array, jax.Array]:
        n = b.shape[0]

        def one(k: Any) -> tuple[jax.Array, jax.Array]:
            x, info = self._one(pattern, values[k if values.shape[0] > 1 else 0], b[k])
            if throw:
                self._require(info, pattern, f"solve, {describe(site)}: ")
            return x, info

        if n == 1:
            x, info = one(0)
            return x[None], info[None]
        return jax.lax.map(one, jnp.arange(n))

    def _one(
        self, pattern: Pattern, values: jax.Array, b: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def product(v: jax.Array) -> jax.Array:
            return apply(pattern, values, pattern.ghosts.pool(v))

        def total(*terms: Any) -> jax.Array:
            return allreduce(jnp.stack([jnp.sum(t).astype(b.dtype) for t in terms]), comm=comm)

        comm = pattern.comm
        scale = diagonal(pattern, values)
        u, w = _noise(pattern, b.dtype)
        au, aw = product(u), product(w)
        wrong, negative, size, asymmetry, spread = total(
            ~jnp.isfinite(values).all() | ~jnp.isfinite(b).all(),
            (scale <= 0).any(),
            b * b,
            w * au - u * aw,
            au * au + aw * aw,
        )
        # Without symmetry w.Au - u.Aw is about as large as |Au|; with it, rounding.
        symmetric = jnp.abs(asymmetry) <= jnp.sqrt(jnp.finfo(b.dtype).eps * spread)
        state = jnp.where(symmetric, Result.SUCCESSFUL, Result.NOT_SYMMETRIC)
        state = jnp.where(negative > 0, Result.NOT_POSITIVE_DEFINITE, state)
        state = jnp.where((wrong > 0) | ~jnp.isfinite(size), Result.NOT_FINITE, state)
        goal = jnp.asarray(self.rtol, b.dtype) ** 2 * size

        def unfinished(s: _Iterate) -> jax.Array:
            return (s.steps < self.max_steps) & (s.rr > goal) & (s.state == Result.SUCCESSFUL)

        def step(s: _Iterate) -> _Iterate:
            ap = product(s.p)
            (curvature,) = total(s.p * ap)
            alpha = s.rz / curvature
            x, r = s.x + alpha * s.p, s.r - alpha * ap
            z = r / scale
            rr, rz = total(r * r, r * z)
            state = jnp.where(curvature > 0, s.state, Result.NOT_POSITIVE_DEFINITE)
            return _Iterate(x, r, z + (rz / s.rz) * s.p, rr, rz, s.steps + 1, state)

        z = b / scale
        (rz,) = total(b * z)
        first = _Iterate(jnp.zeros_like(b), b, z, size, rz, jnp.zeros((), "int32"), state)
        last = jax.lax.while_loop(unfinished, step, first)
        reached = jnp.where(last.rr <= goal, Result.SUCCESSFUL, Result.MAX_STEPS_REACHED)
        result = jnp.where(last.state == Result.SUCCESSFUL, reached, last.state)
        valid = (result == Result.SUCCESSFUL) | (result == Result.MAX_STEPS_REACHED)
        x = jnp.where(valid, last.x, jnp.nan)
        residual = jnp.where(size > 0, jnp.sqrt(last.rr / size), 0)
        info = jnp.stack([v.astype(b.dtype) for v in (result, last.steps, residual, jnp.zeros(()))])
        return x, info

    def _require(self, info: jax.Array, pattern: Pattern, head: str) -> None:
        result, steps, residual = info[0], info[1], info[2]
        for bad, message in (
            (
                Result.NOT_FINITE,
                "the matrix or the right-hand side holds NaN or infinity. Look for a division by "
                "zero or an overflow in what computes them.",
            ),
            (
                Result.NOT_POSITIVE_DEFINITE,
                "the matrix is not positive definite. If all its diagonal entries are negative, "
                "solve with -A and -b instead.",
            ),
            (
                Result.NOT_SYMMETRIC,
                "the matrix is not symmetric; this solver takes symmetric positive definite "
                "matrices only. Check that entries (i, j) and (j, i) get the same value, also "
                "where i and j belong to different ranks.",
            ),
        ):
            require(result != bad, head + message, comm=pattern.comm)
        require(
            result == Result.SUCCESSFUL,
            head + "CG with Jacobi did not converge: the relative residual is {} "
            f"after {{}} iterations, above the tolerance {self.rtol:.3g}. Raise "
            f"max_steps={self.max_steps}, loosen rtol, or solve with mpigrad.sparse.PCG() where "
            "hypre is available; solve(..., throw=False) returns what was reached.",
            residual,
            steps,
            comm=pattern.comm,
        )


class _Iterate(NamedTuple):
    x: jax.Array
    r: jax.Array
    p: jax.Array
    rr: jax.Array
    rz: jax.Array
    steps: jax.Array
    state: jax.Array


def _noise(pattern: Pattern, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Two vectors in [-1, 1) that look random and depend on the global row alone.

    Integer arithmetic: a sine may round differently in each loop that XLA fuses it into.
    """
    row = jnp.arange(pattern.n_local, dtype="uint32") + np.uint32(pattern.offset % 2**32)
    vectors = []
    for factor in (2654435761, 2246822519):  # odd, well spread bits
        bits = row * np.uint32(factor)
        bits = (bits ^ (bits >> 15)) * np.uint32(3266489917)
        vectors.append((bits >> 8).astype(dtype) * 2.0**-23 - 1)
    return vectors[0], vectors[1]
