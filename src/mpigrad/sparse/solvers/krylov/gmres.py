"""GMRES with restarts: classical Gram-Schmidt twice, two reductions in each iteration."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpigrad.operations.carrier import mark_common_branch
from mpigrad.sparse.solvers.krylov.system import RUNNING, LinearSystem, Outcome

__all__ = ["gmres"]


class _Iterate(NamedTuple):
    x: jax.Array
    basis: jax.Array  # (m + 1, n_local), orthonormal rows
    triangle: jax.Array  # (m, m), of the Hessenberg matrix's QR factorisation
    rotation: jax.Array  # (m + 1, m + 1), unitary: rotation @ Hessenberg = triangle
    scale: jax.Array  # |b - A x| at the start of the cycle
    column: jax.Array  # the number of columns of the cycle
    fresh: jax.Array  # True if the next product is A x, to start a cycle
    steps: jax.Array
    state: jax.Array


def gmres(s: LinearSystem, restart: int) -> Outcome:
    """Solve with any A by minimal residuals (Saad & Schultz, SIAM J. Sci. Stat. Comput. 7, 1986).

    The preconditioner is on the right, so that |b - A x| itself is minimised. Each cycle starts
    from the true residual, which also decides if the solve has converged.
    """
    m, n, dtype = min(restart, s.max_steps), s.b.shape[0], s.b.dtype
    size, goal, state, _ = s.begin()
    rows = jnp.arange(m + 1)
    identity = jnp.eye(m + 1, dtype=dtype)
    real = size.dtype

    def extend(i: _Iterate) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the next basis vector, its coefficients, and its norm before scaling."""
        q = s.product(jnp.where(i.fresh, i.x, s.precondition(i.basis[i.column])))
        w = jnp.where(i.fresh, s.b - q, q)
        present = (rows <= i.column) & ~i.fresh
        h = jnp.where(present, s.sums(i.basis.conj() @ w), 0)
        w -= h @ i.basis
        sums = s.sums(jnp.concatenate([i.basis.conj() @ w, jnp.vdot(w, w)[None]]))
        again = jnp.where(present, sums[:-1], 0)
        w -= again @ i.basis
        # The second correction is small compared with w: nothing cancels.
        norm = jnp.sqrt(jnp.maximum(sums[-1].real - jnp.vdot(again, again).real, 0))
        return w / jnp.where(norm > 0, norm, 1).astype(dtype), h + again, norm

    def step(i: _Iterate) -> _Iterate:
        j = i.column
        w, h, norm = extend(i)
        basis = i.basis.at[jnp.where(i.fresh, 0, j + 1)].set(w)

        # A fresh cycle: its residual is w, of this norm.
        start = _Iterate(
            i.x, basis, identity[:m, :m], identity, norm, jnp.zeros_like(j),
            jnp.zeros_like(i.fresh), i.steps,
            s.verdict(norm**2, goal, i.scale**2, i.steps),
        )  # fmt: skip

        # One more column: rotate its last two entries into one.
        column = i.rotation @ h
        a, radius = column[j], jnp.sqrt(jnp.abs(column[j]) ** 2 + norm**2)
        turned = jnp.where(radius > 0, radius, 1)
        turn = (jnp.stack([a.conj(), norm, -norm, a]).reshape(2, 2) / turned).astype(dtype)
        pair = jax.lax.dynamic_slice_in_dim(i.rotation, j, 2)
        rotation = jax.lax.dynamic_update_slice_in_dim(i.rotation, turn @ pair, j, 0)
        # Without a pivot, an infinite one leaves this column out of the solution.
        pivot = jnp.where(radius > 0, radius, jnp.inf).astype(dtype)
        column = jnp.where(rows == j, pivot, jnp.where(rows < j, column, 0))
        triangle = i.triangle.at[:, j].set(column[:m])
        residual = i.scale * jnp.abs(rotation[j + 1, 0])
        steps = i.steps + 1
        full = (j + 1 == m) | (residual**2 <= goal) | (steps >= s.max_steps)
        full |= (
            norm <= jnp.finfo(real).eps * radius
        )  # an invariant subspace: x solves, if any vector does

        def finish(_: None) -> jax.Array:
            g = jnp.where(rows[:m] <= j, i.scale * rotation[:m, 0], 0)
            y = jax.scipy.linalg.solve_triangular(triangle, g)
            return i.x + s.precondition(y @ basis[:m])

        x = jax.lax.cond(full & ~i.fresh, mark_common_branch(finish), lambda _: i.x, None)
        state = s.unless_finite(radius, RUNNING, i.steps)
        grown = _Iterate(
            x, basis, triangle, rotation, i.scale, j + 1, full, steps, state
        )  # fmt: skip
        return _Iterate(*(jnp.where(i.fresh, u, v) for u, v in zip(start, grown, strict=True)))

    zero = jnp.zeros((), "int32")
    first = _Iterate(
        s.guess(size), jnp.zeros((m + 1, n), dtype), identity[:m, :m], identity,
        jnp.full((), jnp.inf, real), zero, jnp.ones((), bool), zero, state,
    )  # fmt: skip
    end = jax.lax.while_loop(lambda i: i.state == RUNNING, step, first)
    return Outcome(end.x, end.scale**2, size, end.steps, end.state)
