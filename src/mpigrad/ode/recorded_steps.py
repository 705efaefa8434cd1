"""The recorded steps of an integration, taken again by operations that are differentiable.

The stages are known, so no Newton step is repeated: each is the known solution of an equation, with
the derivatives of the implicit function theorem.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad import loops
from mpigrad.extend import mark_common_branch
from mpigrad.ode.problem import Problem
from mpigrad.sparse import newton

__all__ = ["march"]


def march(
    problem: Problem, parameters: Sequence[Any], y0: Any, ts: Any, record: Sequence[Any]
) -> Any:
    """Take the recorded steps, and return the states at ts, and the last time."""
    lengths, starts, intervals, stages = record
    method, dtype = problem.method, y0.dtype
    below, nodes = jnp.asarray(method.below_diagonal(), dtype), jnp.asarray(method.nodes(), dtype)
    explicit = None if problem.g is None else jnp.asarray(method.explicit_rows(), dtype)

    def one(y: Any, length: Any, start: Any, interval: Any, known: Any, h: Any = None) -> Any:
        if problem.folder is not None:
            stages = jnp.zeros((method.stages - 1, y.shape[0]), dtype)
            y, known = problem.folder.get(known, [y, stages])
        begin = ts[interval]
        width = ts[interval + 1] - begin
        t = begin + start * width
        h = length * width if h is None else h
        my = problem.mass_times(y, parameters)
        empty = jnp.zeros((method.stages, y.shape[0]), dtype)
        first = problem.consistent(problem.slope(t, y, parameters), parameters)
        slopes = empty.at[0].set(first)
        others = empty[:0]
        if explicit is not None:
            others = empty.at[0].set(problem.explicit_slope(t, y, parameters))

        def stage(carry: Any, row: Any) -> Any:
            slopes, others, i, _ = carry
            weights, more, node, guess = row
            base = my + h * (weights @ slopes)
            if explicit is not None:
                base = base + h * (more @ others)
            time, scale = t + node * h, h * method.diagonal

            def residual(y: Any, base: Any, time: Any, scale: Any) -> Any:
                f = problem.slope(time, y, parameters)
                return problem.mass_times(y, parameters) - base - scale * f

            def matrix(y: Any, base: Any, time: Any, scale: Any) -> Any:
                return problem.system(problem.jacobian(time, y, parameters), scale, parameters)

            y = newton(
                residual,
                guess,
                problem.solver,
                (base, time, scale),
                jacobian=None if problem.pattern is None else matrix,
                atol=np.inf,
                comm=None if problem.pattern is not None else problem.comm,
            ).value
            slopes = slopes.at[i + 1].set(problem.slope(time, y, parameters))
            if explicit is not None:
                others = others.at[i + 1].set(problem.explicit_slope(time, y, parameters))
            return (slopes, others, i + 1, y), None

        extra = below if explicit is None else explicit[:-1]
        start_ = (slopes, others, jnp.zeros((), "int32"), y)
        (slopes, others, _, y), _ = jax.lax.scan(stage, start_, (below, extra, nodes, known))
        if explicit is not None:
            y = y + h * (explicit[-1] @ others)
        return y

    def step(state: Any, row: Any) -> Any:
        (y, ys), taken = state, row[0] > 0
        y = jax.lax.cond(taken, mark_common_branch(one), lambda y, *_: y, y, *row)
        # The last step of an interval ends at an output time.
        slot = jnp.where(taken, row[2] + 1, ts.shape[0])
        return (y, ys.at[slot].set(y, mode="drop")), None

    rows = (lengths, starts, intervals, stages)
    start = (y0, jnp.zeros((ts.shape[0], *y0.shape), dtype).at[0].set(y0))
    y, ys = loops.scan(step, start, problem.max_steps, rows, checkpoints=1)[0]
    if problem.end is None:
        return ys, ts[-1]
    last = jnp.argmin(lengths)
    row = tuple(r[last] for r in rows)
    happened = row[0] < 0

    def to_event(y: Any, length: Any, start: Any, interval: Any, known: Any) -> tuple[Any, Any]:
        """Return the state at the event and its time, after two Newton steps for its length.

        The length is known: each of them adds an order of its derivatives.
        """
        begin = ts[interval]
        width = ts[interval + 1] - begin
        t, h = begin + start * width, jax.lax.stop_gradient(-length * width)

        def state(h: Any) -> Any:
            return one(y, length, start, interval, known, h)

        def value(h: Any) -> Any:
            return problem.event(t + h, state(h), parameters)

        slope = jax.lax.stop_gradient(jax.jvp(value, (h,), (jnp.ones_like(h),))[1])

        def improve(known: Any, _: Any) -> tuple[Any, None]:
            h, *_ = known
            y = state(h)
            return (h - problem.event(t + h, y, parameters) / slope, y, h), None

        (_, end, h), _ = jax.lax.scan(improve, (h, y, h), None, length=3)
        return end, t + h

    y, time = jax.lax.cond(
        happened, mark_common_branch(to_event), lambda y, *_: (y, ts[-1]), y, *row
    )
    later = jnp.arange(ts.shape[0])[:, None] > row[2]
    return jnp.where(happened & later, y, ys), time
