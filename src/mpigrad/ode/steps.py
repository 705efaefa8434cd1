"""The steps of an implicit method with error control: no derivatives, the same on all ranks.

A stage is solved by Newton's method with the matrix of the step, M - h a J (simplified Newton;
Hairer & Wanner, Solving Ordinary Differential Equations II, section IV.8). The Jacobian is computed
at the start of a step, and kept for the next steps while Newton's method converges fast.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpigrad.extend import mark_common_branch, noise, two_norms
from mpigrad.ode.problem import Problem
from mpigrad.operations import require, rms_norm
from mpigrad.solution import Result
from mpigrad.sparse import Matrix, solve

__all__ = ["INFO", "Outcome", "require_success", "run"]

RUNNING = -1
INFO = 10  # the entries of Outcome.info
_STAGE_ERROR = 0.01  # of a stage, in parts of the tolerance
_NEWTON_STEPS = {True: 8, False: 24}  # in adaptive steps a shorter step costs less than more
_FAST = 0.05  # a rate of convergence at which the Jacobian is kept
# The reason of a rejected step: a Result, or this and the Result of a linear solve.
_LINEAR = 64
# A shorter step may help a linear solve that ended so. All other ends are errors at once.
_CURABLE = (Result.MAX_STEPS_REACHED, Result.BREAKDOWN, Result.STAGNATED, Result.INACCURATE)
_SAFETY, _SMALLEST, _LARGEST = 0.9, 0.2, 10.0


class Outcome(NamedTuple):
    """The result of all steps.

    Attributes
    ----------
    ys
        The solution at the output times, shape (len(ts), n). NaN after a failure.
    info
        `Result`, the reason of the last rejected step, the time and the length of the last step,
        and the numbers of steps, rejected steps, Newton steps, steps of linear solves, and
        Jacobians. At last the error of the last step, in parts of the tolerance.
    record
        For each step its length and start, in parts of its interval between output times, the
        number of the interval, and the stages, shape (max_steps, stages - 1, n). If they are in
        files, the tickets of the first state and the stages instead. Empty arrays without a record.
        Steps that were not taken have the length zero. That of the step to the event is negative.
    """

    ys: jax.Array
    info: jax.Array
    record: tuple[jax.Array, ...]


class _State(NamedTuple):
    interval: jax.Array
    t: jax.Array
    y: jax.Array
    slope: jax.Array
    h: jax.Array
    jacobian: jax.Array
    at: tuple[jax.Array, ...]  # where a Jacobian without a pattern was computed: t, y
    fresh: jax.Array  # the Jacobian is that of t and y
    keep: jax.Array  # the Jacobian is good enough for this step
    rate: jax.Array  # of Newton's method in the last stage
    counts: jax.Array  # steps, rejected, Newton, linear, Jacobians
    error: jax.Array
    cause: jax.Array
    result: jax.Array
    event: tuple[_Bracket, ...]
    ys: jax.Array
    record: tuple[jax.Array, ...]


class _Bracket(NamedTuple):
    """Two lengths of a step between which the event is, and its values there."""

    start: jax.Array  # the value without a step
    low: jax.Array
    value_low: jax.Array
    high: jax.Array  # zero: no step has passed the event
    value_high: jax.Array
    side: jax.Array  # the end that was moved at last: -1 or 1


class _Stages(NamedTuple):
    i: jax.Array
    slopes: jax.Array  # of f, (stages, n)
    others: jax.Array  # of g, (stages or 0, n)
    ys: jax.Array  # (stages - 1, n)
    rate: jax.Array
    worst: jax.Array  # the slowest rate of the step
    counts: jax.Array  # Newton, linear
    cause: jax.Array  # SUCCESSFUL, or why a stage was not found


class _Newton(NamedTuple):
    y: jax.Array
    size: jax.Array  # of the last change, in parts of the tolerance
    rate: jax.Array
    counts: jax.Array
    done: jax.Array
    cause: jax.Array


def run(problem: Problem, operands: Sequence[Any], y0: Any, ts: Any, dt0: Any, record: bool) -> Any:
    """Integrate from ts[0] to ts[-1], and return an `Outcome`. dt0 is zero if it is not given."""
    method, comm, dtype = problem.method, problem.comm, y0.dtype
    s, n = method.stages, y0.shape[0]
    tiny = 16 * float(jnp.finfo(dtype).eps)
    solver = dataclasses.replace(problem.solver, rtol=problem.linear_rtol)  # type: ignore
    below, nodes = jnp.asarray(method.below_diagonal(), dtype), jnp.asarray(method.nodes(), dtype)
    guesses = jnp.asarray(method.predictors(), dtype)
    error_weights = jnp.asarray(method.error, dtype)
    explicit = None if problem.g is None else jnp.asarray(method.explicit_rows(), dtype)
    integer, most = jnp.int32, _NEWTON_STEPS[problem.adaptive]
    slack = 1 + (1e-6 if problem.adaptive else 1e-2)  # sums of many steps have rounding errors

    def tolerance(*ys: Any) -> Any:
        size = jnp.abs(ys[0])
        for y in ys[1:]:
            size = jnp.maximum(size, jnp.abs(y))
        return problem.atol + problem.rtol * size

    def new_jacobian(t: Any, y: Any) -> tuple[Any, Any]:
        """Return the Jacobian's values, and whether they are wrong along a random vector."""
        values = problem.jacobian(t, y, operands)
        assert problem.pattern is not None
        probe = noise(problem.pattern.offset, n, dtype, 2654435761)
        product = problem.along(t, y, operands)(probe)
        defect, size = two_norms(
            Matrix(problem.pattern, values) @ probe - product, product, comm=comm
        )
        return values, defect > jnp.finfo(dtype).eps ** 0.5 * size

    def stages(state: _State, h: Any, A: Any) -> _Stages:
        scale, my = tolerance(state.y), problem.mass_times(state.y, operands)

        def stage(k: _Stages) -> _Stages:
            t = state.t + nodes[k.i] * h
            base = my + h * (below[k.i] @ k.slopes)
            if explicit is not None:
                base = base + h * (explicit[k.i] @ k.others)
            if problem.mass == "identity":
                guess = base + h * method.diagonal * (guesses[k.i] @ k.slopes)
            else:
                guess = jnp.where(k.i > 0, k.ys[k.i - 1], state.y)

            def newton(j: _Newton) -> _Newton:
                f = problem.slope(t, j.y, operands)
                r = base + h * method.diagonal * f - problem.mass_times(j.y, operands)
                solution = solve(A, r, solver, throw=False)
                y, size = j.y + solution.value, rms_norm(solution.value / scale, comm)
                first = j.counts[0] == k.counts[0]
                rate = jnp.where(first, j.rate, size / j.size)
                bound = jnp.where(rate < 1, rate / (1 - rate), jnp.inf) * size
                done = (bound <= _STAGE_ERROR) | (size == 0)
                counts = j.counts + jnp.stack([1, solution.stats["num_steps"]]).astype(integer)
                late = (counts[0] - k.counts[0] >= most) | (~first & (rate >= 1))
                cause = jnp.where(~done & late, Result.STAGNATED, RUNNING)
                cause = jnp.where(jnp.isfinite(size), cause, Result.NOT_FINITE)
                linear = solution.result
                failed = (linear != Result.SUCCESSFUL) & (linear != Result.NOT_FINITE)
                cause = jnp.where(failed, _LINEAR + linear, cause)
                good = done & (cause == RUNNING)
                cause = jnp.where(good, Result.SUCCESSFUL, cause)
                return _Newton(y, size, rate, counts, good, cause.astype(integer))

            # A slower rate than the last is as likely as a faster one.
            start = jnp.clip(k.rate, 1e-4, 0.9) ** 0.8
            end = jax.lax.while_loop(
                lambda j: j.cause == RUNNING,
                newton,
                _Newton(
                    guess, jnp.ones((), dtype), start, k.counts, jnp.zeros((), bool),
                    jnp.full((), RUNNING, integer),
                ),
            )  # fmt: skip
            slope = (problem.mass_times(end.y, operands) - base) / (h * method.diagonal)
            others = k.others
            if explicit is not None:
                others = others.at[k.i + 1].set(problem.explicit_slope(t, end.y, operands))
            observed = end.counts[0] > k.counts[0] + 1
            return _Stages(
                k.i + 1,
                k.slopes.at[k.i + 1].set(slope),
                others,
                k.ys.at[k.i].set(end.y),
                jnp.where(observed, end.rate, k.rate),
                jnp.where(observed, jnp.maximum(end.rate, k.worst), k.worst),
                end.counts,
                end.cause,
            )

        others = jnp.zeros((0, n), dtype)
        if explicit is not None:
            first = problem.explicit_slope(state.t, state.y, operands)
            others = jnp.zeros((s, n), dtype).at[0].set(first)
        return jax.lax.while_loop(
            lambda k: (k.i < s - 1) & (k.cause == Result.SUCCESSFUL),
            stage,
            _Stages(
                jnp.zeros((), integer),
                jnp.zeros((s, n), dtype).at[0].set(state.slope),
                others,
                jnp.zeros((s - 1, n), dtype),
                state.rate,
                jnp.zeros((), dtype),
                state.counts[2:4],
                jnp.full((), Result.SUCCESSFUL, integer),
            ),
        )

    def step(state: _State) -> _State:
        begin, end = ts[state.interval], ts[state.interval + 1]
        remaining = end - state.t
        seeking = state.event[0].high > 0 if state.event else jnp.zeros((), bool)
        last = state.h * jnp.where(seeking, 1.0, slack) >= remaining
        h = jnp.where(last, remaining, state.h)

        wrong, jacobian, at = jnp.zeros((), bool), state.jacobian, state.at
        if problem.pattern is None:
            at = tuple(
                jnp.where(state.keep, old, new)
                for old, new in zip(state.at, (state.t, state.y), strict=True)
            )
            A = problem.operator(at[0], at[1], h * method.diagonal, operands)
        else:
            jacobian, wrong = jax.lax.cond(
                state.keep,
                lambda: (state.jacobian, jnp.zeros((), bool)),
                mark_common_branch(lambda: new_jacobian(state.t, state.y)),
            )
            A = problem.system(jacobian, h * method.diagonal, operands)
        k = stages(state, h, A)

        y, slope = k.ys[-1], k.slopes[-1]
        estimate = h * (error_weights @ k.slopes)
        if explicit is not None:
            y = y + h * (explicit[-1] @ k.others)
            estimate = estimate + h * (error_weights @ k.others)
        linear = jnp.zeros((), integer)
        if problem.mass != "identity":
            filtered = solve(A, estimate, solver, throw=False)
            estimate, linear = filtered.value, filtered.stats["num_steps"].astype(integer)
        error = rms_norm(estimate / tolerance(state.y, y), comm)
        found = k.cause == Result.SUCCESSFUL
        finite = jnp.isfinite(error)
        accept = found & finite & ((error <= 1) | (not problem.adaptive))
        brackets, trial = state.event, h
        seeks = ends = jnp.zeros((), bool)  # steps are tried that end at the event; this one does
        if problem.end is not None:
            value = problem.event(state.t + h, y, operands)
            bracket, trial, ends = _narrow(state.event[0], accept, state.t, h, value, problem.rtol)
            seeks = found & finite & ~ends & (bracket.high > 0)
            ends, accept = accept & ends, accept & ~seeks
            brackets = (bracket,)
        known, lost = k.ys, jnp.zeros((), bool)
        if record and (folder := problem.folder) is not None:
            known = jax.lax.cond(
                accept,
                lambda *states: folder.put(states, state.counts[0]),
                lambda *_: jnp.zeros((), integer),
                state.y,
                k.ys,
            )
            lost = rms_norm(jnp.where(known < 0, jnp.ones(1, dtype), 0), comm) > 0
            ends, accept = ends & ~lost, accept & ~lost

        is_new = ~state.keep | state.fresh  # the Jacobian is that of t and y
        next_h = _next_step(problem, state.h, h, last, error, found, finite, accept, is_new)
        next_h = jnp.where(seeks, trial, next_h)
        cause = jnp.where(
            found, jnp.where(finite, Result.MAX_STEPS_REACHED, Result.NOT_FINITE), k.cause
        )
        cause = jnp.where(accept | seeks, state.cause, cause).astype(integer)

        t = jnp.where(accept, jnp.where(last, end, state.t + h), state.t)
        hit = accept & last
        slot = state.counts[0]
        ys = state.ys.at[state.interval + 1].set(jnp.where(hit, y, state.ys[state.interval + 1]))
        if problem.end is not None:
            later = jnp.arange(ts.shape[0])[:, None] > state.interval
            ys = jnp.where(ends & later, y, ys)
        saved = state.record
        if record:
            width = end - begin
            row = (jnp.where(ends, -h, h) / width, (state.t - begin) / width, state.interval, known)
            saved = tuple(
                all.at[slot].set(one.astype(all.dtype)) for all, one in zip(saved, row, strict=True)
            )
            saved = (jnp.where(accept, saved[0], saved[0].at[slot].set(0)), *saved[1:])

        def new_slope() -> Any:
            return problem.consistent(problem.slope(t, y, operands), operands)

        if explicit is not None:
            slope = new_slope()
        else:  # the slope of a stage is a difference that was divided by h
            rounded = h < 1e-6 * state.h
            slope = jax.lax.cond(rounded, mark_common_branch(new_slope), lambda: slope)
        interval = state.interval + hit
        change = jnp.stack(
            [
                accept,
                ~accept,
                k.counts[0] - state.counts[2],
                k.counts[1] - state.counts[3] + linear,
                ~state.keep,
            ]
        )
        counts = state.counts + change.astype(integer)
        complete = ends | (interval == ts.shape[0] - 1)
        result = jnp.where(
            counts[0] + counts[1] >= problem.max_steps, Result.MAX_STEPS_REACHED, RUNNING
        )
        small = ~accept & ~seeks & (next_h < tiny * jnp.maximum(jnp.abs(t), first_h))
        result = jnp.where(small, Result.STEP_TOO_SMALL, result)
        curable = (k.cause < _LINEAR) | functools.reduce(
            jnp.logical_or, [k.cause == _LINEAR + reason for reason in _CURABLE]
        )
        result = jnp.where(curable, result, Result.LINEAR_SOLVE_FAILED)
        result = jnp.where(wrong, Result.WRONG_JACOBIAN, result)
        result = jnp.where(lost, Result.NOT_STORED, result)
        result = jnp.where(complete, Result.SUCCESSFUL, result).astype(integer)
        return _State(
            interval.astype(integer),
            t,
            jnp.where(accept, y, state.y),
            jnp.where(accept, slope, state.slope),
            next_h.astype(dtype),
            jacobian,
            at,
            ~accept & is_new,
            jnp.where(accept, k.worst <= _FAST, found | is_new),
            k.rate,
            counts,
            error,
            cause,
            result,
            brackets,
            ys,
            saved,
        )

    slope = problem.consistent(problem.slope(ts[0], y0, operands), operands)
    h = _first_step(problem, operands, y0, slope, ts, dt0, tolerance)
    first_h = h
    finite = jnp.isfinite(rms_norm(slope, comm)) & jnp.isfinite(h) & _increase(ts)
    nnz = 0 if problem.pattern is None else problem.pattern.nnz
    at = (ts[0], y0) if problem.pattern is None else ()
    length = problem.max_steps if record else 0
    event = ()
    if problem.end is not None:
        zero = jnp.zeros((), dtype)
        value = problem.event(ts[0], y0, operands)
        event = (_Bracket(value, zero, value, zero, zero, jnp.zeros((), integer)),)
    start = _State(
        jnp.zeros((), integer), ts[0], y0, slope, h, jnp.zeros(nnz, dtype), at,
        jnp.zeros((), bool), jnp.zeros((), bool), jnp.ones((), dtype), jnp.zeros(5, integer),
        jnp.zeros((), dtype), jnp.zeros((), integer),
        jnp.where(finite, RUNNING, Result.NOT_FINITE).astype(integer), event,
        jnp.full((ts.shape[0], n), jnp.nan, dtype).at[0].set(y0),
        (jnp.zeros(length, dtype), jnp.zeros(length, dtype), jnp.zeros(length, integer),
         jnp.zeros((length, s - 1, n), dtype) if problem.folder is None
         else jnp.zeros(length, integer)),
    )  # fmt: skip
    end = jax.lax.while_loop(lambda state: state.result == RUNNING, step, start)
    info = [end.result, end.cause, end.t, end.h, *end.counts, end.error]
    return Outcome(end.ys, jnp.stack([jnp.asarray(v).astype(dtype) for v in info]), end.record)


def _increase(ts: Any) -> Any:
    return jnp.all(jnp.diff(ts) > 0) & jnp.all(jnp.isfinite(ts))


def _next_step(
    problem: Problem, planned: Any, h: Any, last: Any, error: Any, found: Any, finite: Any,
    accept: Any, is_new: Any,
) -> Any:  # fmt: skip
    """Return the length of the next step, after one of length h.

    It is that of diffrax's `PIDController`. A step whose stages were not found is shorter by a
    factor of four, or the same step is taken with a new Jacobian.
    """
    grown = _SAFETY * jnp.maximum(error, 1e-12) ** (-1.0 / problem.method.error_order)
    factor = jnp.clip(grown, _SMALLEST, jnp.where(accept, _LARGEST, _SAFETY))
    again = ~found & ~is_new
    if not problem.adaptive:
        return jnp.where(accept | again, planned, 0.0)
    after = h * jnp.where(found & finite, factor, jnp.where(again, 1.0, 0.25))
    # The last step before an output time may have been much shorter than planned.
    return jnp.where(accept & last, jnp.maximum(after, planned), after)


def _narrow(
    old: _Bracket, good: Any, t: Any, h: Any, value: Any, rtol: float
) -> tuple[_Bracket, Any, Any]:
    """Return the bracket after a step of length h, the next length to try, and whether h will do.

    The method is that of Illinois (Dowell & Jarratt, BIT 11, 1971). A step that does not reach the
    event is accepted, and the next bracket starts at its end. After a step that is not good, the
    search begins anew.
    """
    known = old.high > 0
    signs = jnp.sign(old.start) * jnp.sign(value)
    passes = (signs < 0) | ((value == 0) & (old.start != 0))
    side = jnp.where(passes, 1, -1)
    again = known & (side == old.side)
    low = jnp.where(passes, old.low, jnp.where(known, h, 0.0))
    value_low = jnp.where(passes, jnp.where(again, 0.5, 1.0) * old.value_low, value)
    high = jnp.where(passes, h, old.high)
    value_high = jnp.where(passes, value, jnp.where(again, 0.5, 1.0) * old.value_high)
    part = value_low / jnp.where(value_low == value_high, 1.0, value_low - value_high)
    trial = low + jnp.clip(part, 0.0, 1.0) * (high - low)
    tolerance = 0.01 * rtol * high + 16 * jnp.finfo(h.dtype).eps * jnp.abs(t)
    ends = good & (high > 0) & (jnp.abs(trial - h) <= tolerance)
    start = jnp.where(high > 0, old.start, value)
    new = _Bracket(start, low, value_low, high, value_high, side.astype(old.side.dtype))
    zero = jnp.zeros_like(h)
    anew = _Bracket(old.start, zero, old.start, zero, zero, old.side)
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, anew), trial, ends


def _first_step(
    problem: Problem, operands: Any, y0: Any, slope: Any, ts: Any, dt0: Any, tolerance: Callable
) -> Any:
    """Return dt0, or the length that Hairer, Nørsett & Wanner (I, section II.4) give."""
    whole = ts[-1] - ts[0]
    if not problem.adaptive or problem.mass != "identity":
        return jnp.where(dt0 > 0, dt0, 1e-4 * whole)
    scale, comm = tolerance(y0), problem.comm
    d0, d1 = rms_norm(y0 / scale, comm), rms_norm(slope / scale, comm)
    h0 = jnp.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * d0 / jnp.maximum(d1, 1e-5))
    h0 = jnp.minimum(h0, whole)
    after = problem.slope(ts[0] + h0, y0 + h0 * slope, operands)
    d2 = rms_norm((after - slope) / scale, comm) / h0
    most = jnp.maximum(d1, d2)
    h1 = jnp.where(
        most <= 1e-15,
        jnp.maximum(1e-6, h0 * 1e-3),
        (0.01 / most) ** (1.0 / problem.method.error_order),
    )
    return jnp.where(dt0 > 0, dt0, jnp.minimum(100 * h0, h1)).astype(y0.dtype)


def require_success(info: Any, ts: Any, head: str, problem: Problem) -> None:
    """Raise on every rank, with time, reason and a remedy, unless `info` holds a success."""
    result, cause, t, h, steps, rejected, *_ = info
    comm = problem.comm
    require(
        _increase(ts),
        f"{head}ts must increase and be finite in {ts.dtype}, got values from {{}} to {{}}. To go "
        "back in time, integrate -f.",
        ts[0],
        ts[-1],
        comm=comm,
    )
    require(
        result != Result.NOT_FINITE,
        f"{head}{Result.NOT_FINITE.message} in f at the first state, t = {{}}. Look for a division "
        "by zero in f.",
        t,
        comm=comm,
    )
    require(
        result != Result.WRONG_JACOBIAN,
        f"{head}{Result.WRONG_JACOBIAN.message} f: along a random vector they differ, at t = {{}}. "
        "The pattern lacks entries, or `jacobian` is wrong. Raise reach of sparse.find_pattern, or "
        "leave both out.",
        t,
        comm=comm,
    )
    folder = problem.folder
    require(
        result != Result.NOT_STORED,
        f"{head}{Result.NOT_STORED.message} in {'' if folder is None else folder.directory!r}, at "
        "t = {}. Free space there, or give checkpoints=loops.Files another directory. "
        "integrate(..., throw=False) returns what was computed.",
        t,
        comm=comm,
    )
    when = "after {} steps and {} rejected ones, at t = {}"
    rest = "integrate(..., throw=False) returns what was computed."
    small = {True: Result.STEP_TOO_SMALL.message, False: "a step failed"}[problem.adaptive]
    late = "max_steps steps were taken"
    tolerances = f"rtol={problem.rtol:.3g} and atol={problem.atol:.3g}"
    longer = f"loosen {tolerances}" if problem.adaptive else "take a longer dt0"
    reasons = {
        Result.NOT_FINITE: "a stage became NaN or infinite. Look for a division by zero or an "
        "overflow in f.",
        Result.STAGNATED: "Newton's method did not converge in a stage. Check that f is smooth, or "
        f"lower linear_rtol={problem.linear_rtol:.3g}.",
        Result.MAX_STEPS_REACHED: "the error of the last rejected step was above the tolerance. "
        f"Loosen {tolerances}, or check that f is smooth.",
    }
    for reason in Result:
        solver = f"a linear solve by {problem.solver!r} ended with {reason.name} ({reason.message})"
        reasons[_LINEAR + reason] = f"{solver}. Take another solver."  # type: ignore
    for reason, text in reasons.items():
        for failure, kind in (
            (Result.LINEAR_SOLVE_FAILED, "a step failed"), (Result.STEP_TOO_SMALL, small),
        ):  # fmt: skip
            if failure == Result.STEP_TOO_SMALL or reason > _LINEAR:
                require(
                    ~((result == failure) & (cause == reason)),
                    f"{head}{kind} {when}: {text} {rest}",
                    steps,
                    rejected,
                    t,
                    comm=comm,
                )
    require(
        result == Result.SUCCESSFUL,
        f"{head}{late} {when}, before the last output time, with steps of {{}}. Raise "
        f"max_steps={problem.max_steps}, or {longer}. {rest}",
        steps,
        rejected,
        t,
        h,
        comm=comm,
    )
