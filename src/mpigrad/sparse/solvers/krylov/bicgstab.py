"""Stabilised biconjugate gradients, two reductions in each iteration."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mpigrad.operations.carrier import mark_common_branch
from mpigrad.sparse.solvers.krylov.system import RUNNING, LinearSystem, Outcome

__all__ = ["bicgstab"]


class _Iterate(NamedTuple):
    x: jax.Array
    r: jax.Array  # b - A x, by recursion
    shadow: jax.Array
    p: jax.Array
    rho: jax.Array  # shadow.r
    rr: jax.Array
    last: jax.Array  # |b - A x|^2 at the last check
    steps: jax.Array
    check: jax.Array  # True if b - A x is computed again, to restart from there
    state: jax.Array


def bicgstab(s: LinearSystem) -> Outcome:
    """Solve with any A in short recursions (van der Vorst, SIAM J. Sci. Stat. Comput. 13, 1992).

    When a recursion breaks down, and when the method seems to have converged, the true residual is
    computed. The method ends if it is small enough, and restarts from it if not.
    """
    dtype = s.b.dtype
    size, goal, state, _ = s.begin()
    eps = jnp.finfo(dtype).eps

    def advance(i: _Iterate, y: jax.Array, v: jax.Array, sigma: jax.Array) -> _Iterate:
        alpha = jnp.where(sigma == 0, 0, i.rho / jnp.where(sigma == 0, 1, sigma))
        half = i.r - alpha * v
        z = s.precondition(half)
        q = s.product(z)
        qs, qq, ss, hs, hq = s.dots(
            (q, half), (q, q), (half, half), (i.shadow, half), (i.shadow, q)
        )
        omega = jnp.where(qq == 0, 0, qs / jnp.where(qq == 0, 1, qq))
        r, rho = half - omega * q, hs - omega * hq
        # The true residual is computed in the end, whatever cancels here.
        rr = jnp.maximum(ss.real - (omega * qs.conj()).real, 0)
        broken = jnp.abs(rho) <= eps * jnp.sqrt(rr * i.last)
        broken |= (omega == 0) | (sigma == 0)
        divisor = jnp.where(broken, 1, i.rho * omega)
        p = r + rho * alpha / divisor * (i.p - omega * v)
        steps = i.steps + 1
        check = (rr <= goal) | (steps >= s.max_steps) | broken
        state = s.unless_finite(rr + jnp.abs(rho), RUNNING, i.steps)
        return _Iterate(
            i.x + alpha * y + omega * z, r, i.shadow, p, rho, rr, i.last, steps, check, state
        )

    def restart(i: _Iterate, v: jax.Array, rr: jax.Array) -> _Iterate:
        r = s.b - v
        verdict = s.verdict(rr, goal, i.last, i.steps)
        return _Iterate(
            i.x, r, r, r, rr.astype(dtype), rr, rr, i.steps, jnp.zeros_like(i.check), verdict
        )

    def step(i: _Iterate) -> _Iterate:
        y = s.precondition(i.p)
        v = s.product(jnp.where(i.check, i.x, y))
        r = s.b - v
        sigma, rr = s.dots((i.shadow, v), (r, r))
        return jax.lax.cond(
            i.check,
            mark_common_branch(lambda: restart(i, v, rr.real)),
            lambda: advance(i, y, v, sigma),
        )

    zero = jnp.zeros_like(s.b)
    infinite = jnp.full((), jnp.inf, size.dtype)
    first = _Iterate(
        s.guess(size), zero, zero, zero, jnp.zeros((), dtype), size, infinite,
        jnp.zeros((), "int32"), jnp.ones((), bool), state,
    )  # fmt: skip
    end = jax.lax.while_loop(lambda i: i.state == RUNNING, step, first)
    return Outcome(end.x, end.rr, size, end.steps, end.state)
