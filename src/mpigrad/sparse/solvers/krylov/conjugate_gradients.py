"""Preconditioned conjugate gradients with one reduction in each iteration."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpigrad.solution import Result
from mpigrad.sparse.solvers.krylov.system import RUNNING, LinearSystem, Outcome

__all__ = ["pcg"]


class _Iterate(NamedTuple):
    x: jax.Array
    r: jax.Array  # b - A x, by recursion
    p: jax.Array
    ap: jax.Array
    rz: jax.Array
    alpha: jax.Array
    rr: jax.Array
    last: jax.Array  # |b - A x|^2 at the last check
    steps: jax.Array
    check: jax.Array  # True if the next product is A x, to compute b - A x again
    state: jax.Array


def pcg(s: LinearSystem) -> Outcome:
    """Solve with a symmetric positive definite A (Chronopoulos & Gear, J. Comput. Appl. Math. 25,
    1989).

    The recursions drift from the true residual. So when the method seems to have converged, the
    true residual is computed, and the method restarts from it if it is too large.
    """
    dtype = s.b.dtype
    eps = jnp.finfo(dtype).eps
    size, goal, state = s.begin_symmetric()

    def step(i: _Iterate) -> _Iterate:
        z = s.precondition(i.r)
        q = s.product(jnp.where(i.check, i.x, z))
        r = jnp.where(i.check, s.b - q, i.r)
        rr, rz, zaz = s.dots((r, r), (i.r, z), (z, q))

        seems_done = (rr <= goal) | (i.steps >= s.max_steps)
        beta = rz / i.rz
        curvature = zaz - beta * rz / i.alpha  # p.Ap of the new direction p = z + beta p
        bad = (rz <= 0) | (zaz <= 0) | (curvature < -jnp.sqrt(eps) * zaz)
        go = ~i.check & ~seems_done & (curvature > 0) & ~bad
        beta, alpha = jnp.where(go, beta, 0), jnp.where(go, rz / curvature, 0)
        p, ap = z + beta * i.p, q + beta * i.ap

        going = jnp.where(bad & ~seems_done, Result.NOT_POSITIVE_DEFINITE, RUNNING)
        state = jnp.where(i.check, s.verdict(rr, goal, i.last, i.steps), going)
        return _Iterate(
            i.x + alpha * p,
            r - alpha * ap,
            p,
            ap,
            jnp.where(go, rz, jnp.inf),  # infinite: the next direction is the residual's
            jnp.where(go, alpha, 1),
            rr,
            jnp.where(i.check, rr, i.last),
            i.steps + go,
            ~i.check & ~go,
            s.unless_finite(rr + rz + zaz, state, i.steps),
        )

    zero, one = jnp.zeros_like(s.b), jnp.ones((), dtype)
    infinite, true = jnp.full((), jnp.inf, dtype), jnp.ones((), bool)
    first = _Iterate(
        s.guess(size), zero, zero, zero, infinite, one, size, infinite,
        jnp.zeros((), "int32"), true, state,
    )  # fmt: skip
    end = jax.lax.while_loop(lambda i: i.state == RUNNING, step, first)
    return Outcome(end.x, end.rr, size, end.steps, end.state)
