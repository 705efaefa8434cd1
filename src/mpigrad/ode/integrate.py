"""Initial value problems in time, with the exact derivatives of their steps.

One primitive takes the steps. Its derivative is that of a second program, which takes the recorded
steps again, of the same lengths and with known stages, by operations that are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr

from mpigrad import loops
from mpigrad.communicator import Communicator, resolve
from mpigrad.extend import (
    CARRIER,
    Activity,
    StateFolder,
    as_array,
    call_site,
    carrier,
    constants_as_operands,
    describe,
    opaque_zero,
    primitive,
    set_carrier,
    without_carriers,
)
from mpigrad.ode.methods import Kvaerno3, Method
from mpigrad.ode.problem import Problem, Traced
from mpigrad.ode.recorded_steps import march
from mpigrad.ode.steps import INFO, require_success, run
from mpigrad.solution import Result, Solution
from mpigrad.sparse import BiCGStab, Jacobi, LinearSolver, Matrix, Pattern, sparse_jacobian

__all__ = ["integrate"]

_LINK = np.float32(0)


def integrate(
    f: Callable[..., Any],
    y0: Any,
    ts: Any,
    args: tuple[Any, ...] | list[Any] = (),
    method: Method | None = None,
    *,
    pattern: Pattern | None = None,
    jacobian: Callable[..., Matrix] | None = None,
    solver: LinearSolver | None = None,
    rtol: float = 1e-3,
    atol: float = 1e-6,
    linear_rtol: float = 1e-3,
    dt0: Any = None,
    adaptive: bool = True,
    mass: Any = None,
    explicit: Callable[..., Any] | None = None,
    event: Callable[..., Any] | None = None,
    max_steps: int = 256,
    checkpoints: loops.Files | None = None,
    throw: bool = True,
    comm: Communicator | None = None,
) -> Solution:
    """Integrate M dy/dt = f(t, y, *args) by an implicit method with error control (collective).

    All ranks take the same steps. Differentiable in y0, ts, args and all that f closes over, in
    forward and reverse mode and to any order. The derivative is that of the accepted steps (the
    discrete adjoint; Hager, Numerische Mathematik 87, 2000), with their lengths held in proportion
    to the intervals between output times. The adjoint takes the steps back, with one solve with the
    transposed matrix for each stage.

    Parameters
    ----------
    f
        The slope f(t, y, *args) of this rank's part of y. It returns an array like y, and may
        exchange messages.
    y0
        The first state: this rank's part, a real array of any shape.
    ts
        The output times, increasing, the same on all ranks, shape (k,) with k >= 2. Steps end at
        each of them.
    args
        The parameters of f, a tuple or a list: arrays, or pytrees of arrays.
    method
        `Kvaerno3()`, the default, or another `Method`.
    pattern
        The pattern of df/dy, with all diagonal entries: see `sparse.find_pattern`. Its rows and
        columns are the entries of y in C order on each rank. Without it the linear systems are
        solved matrix-free.
    jacobian
        Or the Jacobian itself: jacobian(t, y, *args) -> Matrix, with all diagonal entries.
    solver
        The `LinearSolver` of the systems with M - h a df/dy. Its tolerance is that of the solves of
        the derivatives. Default: BiCGStab with Jacobi's preconditioner, or without one if there is
        no pattern.
    rtol, atol
        The tolerance of the error of one step: the root mean square over all ranks' entries of
        error / (atol + rtol |y|) is at most 1.
    linear_rtol
        The tolerance of the linear solves in the Newton steps of a stage. Lower it if the entries
        of y have different scales and Newton's method does not converge.
    dt0
        The length of the first step. Default: estimated from f.
    adaptive
        False: all steps have the length dt0, but for the last one before each output time.
    mass
        M: None for the identity, an array like y0 for a diagonal matrix, or a `Matrix` with all
        diagonal entries. Rows of zeros are algebraic equations (index 1). y0 must nearly satisfy
        them: the first step makes it consistent if Newton's method converges from there.
    explicit
        A second slope g(t, y, *args), for dy/dt = f + g, which is not stiff and is treated
        explicitly. It needs a `KenCarp` method, and no `mass`.
    event
        event(t, y, *args) -> a number, the same on all ranks: compute it from a reduction. The
        integration ends when its sign changes, at the latest at ts[-1]. Later output times then
        have the state at the event. The length of the step to it is found by trial, to a hundredth
        of the tolerance. Its derivatives are those of the implicit function theorem, of first and
        second order.
    max_steps
        The largest number of steps, with the rejected ones. Derivatives store the stages of so many
        steps in memory.
    checkpoints
        `loops.Files(directory)`: derivatives store the stages of all steps in files.
    throw
        Raise an error on every rank if the integration fails. With `throw=False`, look at
        `Solution.result`: states after the failure are NaN, and their derivatives are zero.
    comm
        The communicator over whose ranks y is distributed. Default: that of the pattern, else the
        default communicator.

    Returns
    -------
    A `Solution`: `value` has the states at `ts`, shape (k, *y0.shape). `stats`, the same on all
    ranks, has `num_steps`, `num_rejected`, `num_newton_steps`, `num_linear_steps`, `num_jacobians`,
    and the `time` that was reached, that of the event for instance. It is differentiable.

    Raises
    ------
    TypeError, ValueError
        If the shapes, dtypes or settings do not fit together.
    jax.errors.JaxRuntimeError
        On all ranks, if the integration fails and `throw` is true: it names time, step and reason.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad import ode
    >>> def relax(t, y, k):
    ...     return -k * (y - jnp.cos(t))
    >>> def end(k):
    ...     return ode.integrate(relax, jnp.zeros(2), jnp.array([0.0, 1.0]), (k,)).value[-1]
    >>> value, slope = mg.jvp(end, (50.0,), (1.0,))
    >>> bool(jnp.allclose(value, 0.557, atol=1e-3)), bool(jnp.all(jnp.abs(slope) < 1e-3))
    (True, True)
    """
    method = Kvaerno3() if method is None else method
    if isinstance(y0, tuple | list | dict):
        kind = type(y0).__name__
        _fail(TypeError, f"y0 must be one array, got a {kind}. Stack fields along a last axis.")
    y0, ts = as_array(y0), as_array(ts)
    if jnp.issubdtype(y0.dtype, jnp.floating):
        ts = ts.astype(y0.dtype)
    _check(y0, ts, method, args, solver, adaptive, mass, explicit)
    _check_numbers(y0.dtype, rtol, atol, linear_rtol, dt0, adaptive, max_steps)
    flat = y0.reshape(-1)
    leaves, structure = jax.tree.flatten(args)
    leaves = [as_array(leaf) for leaf in leaves]

    def flatten(slope: Callable[..., Any], name: str) -> Callable[..., Any]:
        def flattened(t: Any, y: Any, *leaves: Any) -> Any:
            k = as_array(slope(t, y.reshape(y0.shape), *jax.tree.unflatten(structure, leaves)))
            if k.shape != y0.shape or k.dtype != y0.dtype:
                raise ValueError(
                    f"ode.integrate: {name} must return an array like y, {y0.dtype}"
                    f"{list(y0.shape)}, got {k.dtype}{list(k.shape)}. Return one slope for each "
                    "entry."
                )
            return k.reshape(-1)

        return flattened

    implicit = flatten(f, "f")
    traced, f_constants = Traced.of(implicit, ts[0], flat, *leaves)
    g, g_constants, J, J_constants = None, [], None, []
    if explicit is not None:
        g, g_constants = Traced.of(flatten(explicit, "explicit"), ts[0], flat, *leaves)
    if jacobian is not None and pattern is not None:
        _fail(ValueError, "expected a pattern or a jacobian, got both. Leave out the pattern.")
    if jacobian is not None or pattern is not None:

        def matrix(t: Any, y: Any, *leaves: Any) -> Any:
            if jacobian is None:
                assert pattern is not None
                return sparse_jacobian(lambda y: implicit(t, y, *leaves), pattern)(y)
            A = jacobian(t, y.reshape(y0.shape), *jax.tree.unflatten(structure, leaves))
            if not isinstance(A, Matrix):
                kind = type(A).__name__
                _fail(TypeError, f"jacobian must return a Matrix, got {kind}. Return one.")
            return A

        if pattern is not None:
            _check_pattern("pattern", pattern, flat, comm)
        J, J_constants, shape = Traced.with_shape(matrix, ts[0], flat, *leaves)
        if pattern is None:
            pattern = shape.pattern
            assert pattern is not None
            _check_pattern("pattern of the jacobian", pattern, flat, comm)
        comm = pattern.comm
    end, end_constants = None, []
    if event is not None:
        end, end_constants = Traced.of(_as_number(event, y0, structure), ts[0], flat, *leaves)
    kind, mass_values = _mass(mass, y0, comm)
    problem = Problem(
        traced,
        g,
        J,
        end,
        kind,
        pattern,
        resolve(comm),
        method,
        _chosen(solver, pattern, y0.dtype),
        bool(adaptive),
        float(rtol),
        float(atol),
        float(linear_rtol),
        int(max_steps),
        _folder(checkpoints),
    )
    ys, time, info, *_ = integrate_p.bind(
        *f_constants,
        *g_constants,
        *J_constants,
        *end_constants,
        *mass_values,
        *leaves,
        flat,
        ts,
        jax.lax.stop_gradient(as_array(0.0 if dt0 is None else dt0)).astype(y0.dtype),
        carrier(),
        problem=problem,
        record=False,
        throw=bool(throw),
        site=call_site(),
    )
    counts = [info[i].astype("int32") for i in range(4, 9)]
    names = ("num_steps", "num_rejected", "num_newton_steps", "num_linear_steps", "num_jacobians")
    return Solution(
        value=ys.reshape(ts.shape[0], *y0.shape),
        result=info[0].astype("int32"),
        stats={**dict(zip(names, counts, strict=True)), "time": time},
    )


def _chosen(solver: LinearSolver | None, pattern: Pattern | None, dtype: Any) -> LinearSolver:
    rtol = 1e-8 if dtype == np.float64 else 1e-5
    if pattern is None:
        return (solver or BiCGStab(rtol=rtol)).for_function
    return (solver or BiCGStab(rtol=rtol, preconditioner=Jacobi())).for_matrix


def _as_number(event: Callable[..., Any], y0: Any, structure: Any) -> Callable[..., Any]:
    """Return the event as a function of t, a flat y and the leaves of its arguments."""

    def value(t: Any, y: Any, *leaves: Any) -> Any:
        v = as_array(event(t, y.reshape(y0.shape), *jax.tree.unflatten(structure, leaves)))
        if v.shape != () or v.dtype != y0.dtype:
            _fail(
                ValueError,
                f"event must return a number of {y0.dtype}, got {v.dtype}{list(v.shape)}. Return, "
                "for instance, the mpigrad.allreduce of a sum, minus a threshold.",
            )
        return v

    return value


def _folder(checkpoints: Any) -> StateFolder | None:
    if checkpoints is None:
        return None
    if not isinstance(checkpoints, loops.Files) or (checkpoints.every, checkpoints.inside) != (
        None,
        1,
    ):
        _fail(
            TypeError,
            f"checkpoints must be None or loops.Files(directory), got {checkpoints!r}. All steps "
            "are stored, so leave out `every` and `inside`.",
        )
    return checkpoints.folder(8, "ode.integrate", agrees=True)


def _mass(mass: Any, y0: Any, comm: Communicator | None) -> tuple[Pattern | str, list[Any]]:
    if mass is None:
        return "identity", []
    if isinstance(mass, Matrix):
        _check_pattern("pattern of mass", mass.pattern, y0.reshape(-1), comm)
        return mass.pattern, [mass.values.astype(y0.dtype)]
    values = as_array(mass)
    if values.shape != y0.shape:
        raise ValueError(
            f"ode.integrate: a diagonal mass must have the shape of y0, {y0.shape}, got "
            f"{values.shape}. Give a Matrix for another mass."
        )
    return "diagonal", [values.astype(y0.dtype).reshape(-1)]


def _check_pattern(name: str, pattern: Pattern, y: Any, comm: Communicator | None) -> None:
    if not pattern.n_local == pattern.n_local_columns == y.size:
        raise ValueError(
            f"ode.integrate: y0 has {y.size} entries on rank {pattern.comm.rank}, but the {name} "
            f"has {pattern.n_local} rows and {pattern.n_local_columns} columns there. Give this "
            "rank's part of y."
        )
    if pattern.row_without_diagonal >= 0:
        raise ValueError(
            f"ode.integrate: the {name} must have all diagonal entries, but lacks that of row "
            f"{pattern.row_without_diagonal}. Add the entry (i, i) for every row i."
        )
    if comm is not None and comm.slot != pattern.comm.slot:
        raise ValueError(
            f"ode.integrate: comm is not the communicator of the {name}, which decides. Leave comm "
            "out."
        )


def _fail(kind: type[Exception], text: str) -> None:
    raise kind(f"ode.integrate: {text}")


def _check(
    y0: Any, ts: Any, method: Any, args: Any, solver: Any, adaptive: Any, mass: Any, explicit: Any
) -> None:
    if not jnp.issubdtype(y0.dtype, jnp.floating):
        _fail(TypeError, f"y0 must be real and floating-point, got {y0.dtype}. Convert it.")
    if ts.ndim != 1 or ts.shape[0] < 2:
        _fail(
            ValueError,
            f"ts must have the shape (k,) with k of at least 2, got {ts.shape}. Give the first and "
            "the last time.",
        )
    if not isinstance(ts, Tracer):
        values = np.asarray(ts, float)
        if not (np.all(np.diff(values) > 0) and np.all(np.isfinite(values))):
            _fail(
                ValueError,
                f"ts must increase and be finite in {ts.dtype}, got {values}. To go back in time, "
                "integrate -f.",
            )
    if not isinstance(method, Method):
        _fail(TypeError, f"method must be a Method, got {method!r}. Give ode.Kvaerno3().")
    if not isinstance(args, (tuple, list)):
        name = type(args).__name__
        _fail(TypeError, f"args must be a tuple or a list, got {name}. Write args=(parameter,).")
    if solver is not None and not isinstance(solver, LinearSolver):
        _fail(TypeError, f"solver must be a LinearSolver, got {solver!r}. Give sparse.GMRES().")
    if explicit is not None and method.explicit is None:
        _fail(
            ValueError,
            f"{type(method).__name__} has no explicit part. Give method=ode.KenCarp4(), for "
            "instance.",
        )
    if explicit is not None and mass is not None:
        _fail(
            ValueError,
            "expected mass or explicit, got both. Put all slopes into f, without explicit.",
        )


def _check_numbers(
    dtype: Any, rtol: Any, atol: Any, linear_rtol: Any, dt0: Any, adaptive: Any, max_steps: Any
) -> None:
    for name, value in (("rtol", rtol), ("atol", atol), ("linear_rtol", linear_rtol)):
        if isinstance(value, Tracer) or np.ndim(value):
            _fail(TypeError, f"{name} must be a number, got {value}. Give one for all entries.")
    smallest = 10 * float(jnp.finfo(dtype).eps)
    if not (smallest <= rtol < 1 and atol >= 0):
        _fail(
            ValueError,
            f"rtol must be from {smallest:.2g} (10 times the rounding error of {dtype}) to 1, and "
            f"atol not negative, got rtol={rtol}, atol={atol}. Loosen them, or compute in float64.",
        )
    if not 0 < linear_rtol < 1:
        _fail(ValueError, f"linear_rtol must lie between 0 and 1, got {linear_rtol}. Give 1e-3.")
    if not adaptive and dt0 is None:
        _fail(ValueError, "adaptive=False needs the length of the steps. Give dt0.")
    if not (dt0 is None or isinstance(dt0, Tracer)) and float(dt0) <= 0:
        _fail(ValueError, f"dt0 must be positive, got {dt0}. Leave it out to have it estimated.")
    if not 0 < max_steps < 2**31:
        _fail(ValueError, f"max_steps must be positive, got {max_steps}. Give 256, for instance.")


# ---- the primitive: (operands of the problem..., y0, ts, dt0, carrier) -> ys, time, info, record


def _shapes(*operands: Any, problem: Problem, record: bool, **_: Any) -> list[Any]:
    y0, ts = operands[-4:-2]
    n, dtype, s = y0.shape[0], y0.dtype, problem.method.stages
    length = problem.max_steps if record else 0
    shapes = [
        ((ts.shape[0], n), dtype), ((), dtype), ((INFO,), dtype),
        ((length,), dtype), ((length,), dtype), ((length,), "int32"),
        ((length, s - 1, n), dtype) if problem.folder is None else ((length,), "int32"),
    ]  # fmt: skip
    return [jax.ShapeDtypeStruct(*each) for each in shapes]


def _run(*operands: Any, problem: Problem, record: bool, throw: bool, site: int) -> Any:
    *parameters, y0, ts, dt0, _ = operands
    with without_carriers():  # differentiation has happened: these messages carry values only
        head = f"ode.integrate, {describe(site)}: "
        outcome = run(problem, parameters, y0, ts, dt0, record)
        for t, y in ((ts[0], y0), (outcome.info[2], outcome.ys[-1])):
            problem.require_common_event(t, y, parameters, head)
        if throw:
            require_success(outcome.info, ts, head, problem)
    return outcome.ys, outcome.info[2], outcome.info, *outcome.record


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., Any]]:
    """Return the primal results, the residuals of the tangent map, and the tangent map."""
    problem: Problem = params["problem"]
    results = integrate_p.bind(*operands, **{**params, "record": True})
    ys, time, info, *record = results
    every, a = list(operands[:-1]), operands[-1]
    # All tangents of the linear program vary: JAX cannot transpose a scan in which one is constant.
    varying = [i for i in range(len(every) - 1) if activity.operands[i]]  # not dt0
    link = a + opaque_zero(ys, CARRIER)  # active on every rank on which ys is

    def marched(link: Any, *values: Any) -> tuple[Any, Any]:
        changed = list(every)
        for i, value in zip(varying, values, strict=True):
            changed[i] = value
        *parameters, y0, ts, _ = changed
        with set_carrier(link):
            states, end = march(problem, parameters, y0, ts, record)
        # What was not reached has no derivative.
        successful = info[0] == Result.SUCCESSFUL
        states = jnp.where((successful | (info[2] >= ts))[:, None], states, jnp.nan)
        return states, jnp.where(successful, end, info[2])

    values = [every[i] for i in varying]
    _, derivative = jax.linearize(marched, link, *values)
    moved, constants = constants_as_operands(jax.make_jaxpr(derivative)(_LINK, *values))

    def tangent(constants: Any, tangents: Sequence[Any]) -> list[Any]:
        changes, ta = [tangents[i] for i in varying], tangents[-1]
        ta = opaque_zero(changes[0], CARRIER) if ta is None else ta
        return [*eval_jaxpr(moved, (), *constants, ta, *changes), *[None] * 5]

    if not params["record"]:
        results = [ys, time, info, *(r[:0] for r in record)]
    return results, constants, tangent


integrate_p = primitive(
    "integrate",
    shapes=_shapes,
    run=_run,
    differentiate=_differentiate,
    undifferentiated=(2, 3, 4, 5, 6),
    batch="map",
)
