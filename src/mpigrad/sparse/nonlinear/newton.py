"""Nonlinear systems by Newton's method, differentiated by the implicit function theorem.

One primitive carries F and its Jacobian as jaxprs of (constants..., link, x, arguments...). `link`
is the carrier of their messages. The derivative is one linear solve at the solution, independent of
the iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from mpigrad.communicator import Communicator, resolve
from mpigrad.extend import (
    CARRIER,
    Activity,
    as_array,
    call_site,
    carrier,
    constants_as_operands,
    describe,
    known_again,
    noise,
    opaque_zero,
    primitive,
    set_carrier,
    without_carriers,
)
from mpigrad.solution import Solution
from mpigrad.sparse.matrix.blocks import Blocks
from mpigrad.sparse.matrix.matrix import Matrix
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.nonlinear.newton_steps import (
    INFO,
    Problem,
    iterate,
    require_solution,
    solve_flat,
    summary,
)
from mpigrad.sparse.nonlinear.sparse_jacobian import sparse_jacobian
from mpigrad.sparse.solvers.methods import GMRES, LinearSolver, default_solver
from mpigrad.sparse.solvers.nullspace import (
    as_nullspace,
    from_orthonormal,
    orthonormal,
    projected,
    without_nullspace,
)
from mpigrad.sparse.solvers.operator_solve import linearized, operator_solve_p

__all__ = ["newton"]

_LINK = np.float32(0)


def newton(
    F: Callable[..., Any],
    x0: Any,
    solver: LinearSolver | None = None,
    args: tuple[Any, ...] | list[Any] = (),
    *,
    pattern: Pattern | None = None,
    jacobian: Callable[..., Matrix | Blocks] | None = None,
    rtol: float = 1e-8,
    atol: float = 0.0,
    max_steps: int = 50,
    nullspace: Any = None,
    throw: bool = True,
    comm: Communicator | None = None,
) -> Solution:
    """Solve F(x, *args) = 0 (collective).

    Newton's method halves a step until the residual decreases enough (Armijo 1966), the same number
    of times on all ranks. Differentiable in `args` and in all that `F` closes over, in forward and
    reverse mode and to any order, but not through the iterations: dx = -J⁻¹ dF, and the adjoint
    is one solve with Jᵀ. No derivative is taken with respect to `x0`.

    Parameters
    ----------
    F
        The function F(x, *args) of this rank's part of x. It returns an array of the shape and
        dtype of x, and may exchange messages.
    x0
        The first guess: this rank's part, a real array of any shape.
    solver
        The `LinearSolver` of the linear systems, as in `solve`. Default: GMRES, with multigrid if
        hypre is available and x0 is in float64, else with Jacobi's preconditioner, and without a
        preconditioner if there is no matrix.
    args
        The parameters of F, a tuple or a list: arrays, or pytrees of arrays.
    pattern
        The pattern of dF/dx. Its rows and columns are the entries of x in C order on each rank. The
        Jacobian is then computed by `sparse_jacobian`.
    jacobian
        Or the Jacobian itself: jacobian(x, *args) -> Matrix, or `Blocks`, whose fields follow each
        other in x. It must be the exact derivative, which is checked along a random vector in each
        step. Without `pattern` and `jacobian`, the linear
        systems are solved matrix-free, with derivatives of F along vectors.
    rtol, atol
        Stop when |F(x)| <= max(atol, rtol |F(x0)|), in the two-norm over all ranks. Give `atol`
        if x0 may be a solution already. With `atol=jnp.inf` x0 is taken as the solution without a
        step: that gives a solution found by other means its derivative.
    max_steps
        The largest number of Newton steps.
    nullspace
        The null space of the Jacobian, the same at every x, as for `solve`, with vectors like x.
        The solution is orthogonal to it.
    throw
        Raise an error on every rank if no solution is found: no convergence, NaN, a singular
        Jacobian. With `throw=False`, look at `Solution.result`.
    comm
        The communicator over whose ranks x is distributed. Default: the Jacobian's, if there is a
        matrix (another one is an error), else the default communicator.

    Returns
    -------
    A `Solution`: `value` in the shape of x0, `result` as an integer array (0 is success), and in
    `stats`, the same on all ranks, `num_steps`, `residual` |F(x)|, `relative_residual`
    |F(x)| / |F(x0)| and `num_linear_steps`, the sum over all linear solves.

    Raises
    ------
    TypeError, ValueError
        If the shapes, dtypes or settings do not fit together, if `solver` is not a `LinearSolver`,
        or if `args` is not a tuple or a list.
    jax.errors.JaxRuntimeError
        On all ranks, if no solution is found and `throw` is true.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad.sparse import GMRES, newton
    >>> F = lambda x, p: x**2 - p
    >>> solver = GMRES()
    >>> def root(p):
    ...     return jnp.sum(newton(F, jnp.ones(2), solver, args=(p,), rtol=1e-5).value)
    >>> value, slope = mg.value_and_grad(root)(jnp.array([4.0, 9.0]))
    >>> bool(jnp.allclose(value, 5, rtol=1e-3))
    True
    >>> bool(jnp.allclose(slope, jnp.array([1 / 4, 1 / 6]), rtol=1e-3))
    True
    """
    _check_solver_and_args(solver, args)
    x0 = as_array(x0)
    _check(x0, pattern, jacobian, rtol, atol, max_steps)
    flat = x0.reshape(-1)
    leaves, structure = jax.tree.flatten(args)
    leaves = [as_array(leaf) for leaf in leaves]

    def residual(x: Any, *leaves: Any) -> Any:
        y = as_array(F(x.reshape(x0.shape), *jax.tree.unflatten(structure, leaves)))
        if y.shape != x0.shape or y.dtype != x0.dtype:
            raise ValueError(
                f"newton: F must return an array like x, {x0.dtype}{list(x0.shape)}, got "
                f"{y.dtype}{list(y.shape)}. Return one equation for each unknown."
            )
        return y.reshape(-1)

    def matrix(x: Any, *leaves: Any) -> Matrix | Blocks:
        A = jacobian(x.reshape(x0.shape), *jax.tree.unflatten(structure, leaves))  # type: ignore
        if not isinstance(A, Matrix | Blocks):
            raise TypeError(
                f"newton: jacobian must return a Matrix or Blocks, got {type(A).__name__}. Return "
                "Matrix(pattern, values)."
            )
        return A

    if jacobian is None and pattern is not None:
        jacobian = sparse_jacobian(F, pattern)
    F_jaxpr, F_constants, _ = _traced(residual, flat, leaves)
    J_jaxpr, J_constants, tree, shape = None, [], None, None
    if jacobian is not None:
        J_jaxpr, J_constants, shape = _traced(matrix, flat, leaves)
        _check_pattern(shape.pattern, flat)
        pattern, tree = shape.pattern, jax.tree.structure(shape)
        if comm is not None and comm.slot != shape.pattern.comm.slot:
            raise ValueError(
                "newton: comm is not the communicator of the Jacobian, which decides. Leave comm "
                "out."
            )
    problem = Problem(
        F_jaxpr,
        J_jaxpr,
        (len(F_constants), len(J_constants)),
        pattern,
        resolve(comm) if pattern is None else pattern.comm,
        _chosen(solver, pattern, flat.dtype, blocks=isinstance(shape, Blocks)),
        tree,
    )
    space, null = None, without_nullspace(flat.dtype)
    if nullspace is not None:
        space = as_nullspace(nullspace, problem.solver)
        null = orthonormal(space, _null_vector(x0), flat.size, flat.dtype, problem.comm)
    x, info = newton_p.bind(
        *F_constants,
        *J_constants,
        *leaves,
        jax.lax.stop_gradient(flat),
        jax.lax.stop_gradient(null),
        carrier(),
        problem=problem,
        project=space is not None and space.project,
        rtol=float(rtol),
        atol=float(atol),
        max_steps=int(max_steps),
        throw=bool(throw),
        site=call_site(),
    )
    if space is not None:  # for derivatives in the vectors
        x = projected(null[:1], x[None], problem.comm)[0]
    return Solution(
        value=x.reshape(x0.shape),
        result=info[0].astype("int32"),
        stats={
            "num_steps": info[1].astype("int32"),
            "relative_residual": info[2],
            "residual": info[3],
            "num_linear_steps": info[4].astype("int32"),
        },
    )


def _check_solver_and_args(solver: Any, args: Any) -> None:
    if solver is not None and not isinstance(solver, LinearSolver):
        raise TypeError(
            f"newton: solver must be a LinearSolver, got {_kind(solver)}. Pass parameters of F as "
            "args=(...)."
        )
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"newton: args must be a tuple or a list, got {_kind(args)}. Pass one parameter of F "
            "as args=(parameter,)."
        )


def _null_vector(x0: jax.Array) -> Callable[[Any], jax.Array]:
    def flat(v: Any) -> jax.Array:
        if jnp.shape(v) != x0.shape:
            raise ValueError(
                f"NullSpace: expected a vector like x0, of shape {x0.shape}, got shape "
                f"{jnp.shape(v)}. Give this rank's part of each vector, and several as a list."
            )
        return as_array(v).reshape(-1)

    return flat


def _kind(x: Any) -> str:
    return f"the class {x.__name__}" if isinstance(x, type) else type(x).__name__


def _check(x0: Any, pattern: Any, jacobian: Any, rtol: Any, atol: Any, max_steps: Any) -> None:
    if not jnp.issubdtype(x0.dtype, jnp.floating):
        raise TypeError(
            f"newton: x0 must be real and floating-point, got dtype {x0.dtype}. Convert it, as in "
            "x0.astype(float)."
        )
    if pattern is not None and jacobian is not None:
        raise ValueError(
            "newton: expected a pattern or a jacobian, got both. Leave out the pattern: the "
            "jacobian has one."
        )
    if not (0 <= rtol < 1 and atol >= 0 and rtol + atol > 0):
        raise ValueError(
            f"newton: rtol must lie between 0 and 1, atol must not be negative, and one of them "
            f"must be positive, got rtol={rtol}, atol={atol}. Choose rtol=1e-8, for instance."
        )
    if not 0 < max_steps < 2**31:
        raise ValueError(
            f"newton: max_steps must be positive and below 2**31, got max_steps={max_steps}. "
            "Choose 50, for instance."
        )
    if pattern is not None:
        _check_pattern(pattern, x0)


def _check_pattern(pattern: Pattern, x: Any) -> None:
    if not pattern.n_local == pattern.n_local_columns == x.size:
        raise ValueError(
            f"newton: x0 has {x.size} entries on rank {pattern.comm.rank}, but the Jacobian's "
            f"pattern has {pattern.n_local} rows and {pattern.n_local_columns} columns there. Make "
            "both with the same stripes."
        )


def _chosen(
    solver: LinearSolver | None, pattern: Pattern | None, dtype: Any, *, blocks: bool
) -> LinearSolver:
    if blocks:
        if solver is None:
            raise TypeError(
                "newton: blocks have no default solver. Give GMRES(preconditioner="
                "BlockTriangular(...)), MINRES(preconditioner=BlockDiagonal(...)) or PETSc(...)."
            )
        return solver.for_function  # without a preconditioner if none is given
    if pattern is None:
        return (solver or GMRES()).for_function
    return (solver or default_solver(symmetric=False, dtype=dtype)).for_matrix


# ---- F and its Jacobian as jaxprs ----


def _traced(f: Callable[..., Any], x: Any, leaves: Sequence[Any]) -> tuple[Any, list[Any], Any]:
    """Return the jaxpr of (constants..., link, x, leaves...), the constants, the result's shape."""

    def linked(link: Any, x: Any, *leaves: Any) -> Any:
        with set_carrier(link):
            return f(x, *leaves)

    closed, shape = jax.make_jaxpr(linked, return_shape=True)(_LINK, x, *leaves)
    return *constants_as_operands(closed), shape


# ---- the primitive: (constants..., leaves..., x0, null, carrier) -> x, info. `null` has
# orthonormal null vectors, as that of `operator_solve_p` ----


def _run(
    *operands: Any,
    problem: Problem,
    rtol: float,
    atol: float,
    max_steps: int,
    project: bool,
    throw: bool,
    site: int,
) -> Any:
    *parameters, x0, null, _ = operands
    if np.isinf(atol):
        return x0, jnp.zeros(INFO, x0.dtype)
    with without_carriers():  # differentiation has happened: these messages carry values only
        end = iterate(problem, parameters, x0, null, rtol, atol, max_steps, project)
        info = summary(end)
        if throw:
            head = f"newton, {describe(site)}: "
            require_solution(info, head, problem, rtol, atol, max_steps)
    return end.x, info


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., Any]]:
    """Return the primal results, the residuals of the tangent map, and the tangent map."""
    x, info = newton_p.bind(*operands, **params)
    problem: Problem = params["problem"]
    *parameters, x0, null, a = operands
    if np.isinf(params["atol"]):
        x = known_again(x0, x)
    varying = [
        i for i, p in enumerate(parameters) if jnp.issubdtype(jnp.result_type(p), np.inexact)
    ]
    link = a + opaque_zero(x, CARRIER)  # active on every rank on which x is

    def residual(link: Any, *values: Any) -> Any:
        every = list(parameters)
        for i, value in zip(varying, values, strict=True):
            every[i] = value
        return problem.F(link, x, every)

    values = [parameters[i] for i in varying]
    kinds = list(map(jax.typeof, values))
    _, derivative = jax.linearize(residual, link, *values)
    moved, constants = constants_as_operands(jax.make_jaxpr(derivative)(_LINK, *values))
    forward = None
    if problem.pattern is None:
        probe = noise(problem.comm.rank << 20, x.shape[0], x.dtype, 2654435761)
        forward, at_x, _ = linearized(problem.along(x, parameters), probe, link)
    else:
        at_x = problem.J(link, x, parameters)

    def tangent(saved: Any, tangents: Sequence[Any]) -> list[Any]:
        constants, at_x, null, link = saved
        *changes, _, _, ta = tangents
        changes = [
            jnp.zeros(kind.shape, kind.dtype) if changes[i] is None else changes[i]
            for i, kind in zip(varying, kinds, strict=True)
        ]
        ta = jnp.zeros((), CARRIER.dtype) if ta is None else ta
        rhs = -eval_jaxpr(moved, (), *constants, ta, *changes)[0]
        rhs = rhs + opaque_zero(ta, jax.typeof(rhs))  # active on every rank
        if forward is None:
            assert problem.pattern is not None
            with set_carrier(link):
                A = jax.tree.unflatten(problem.tree, at_x)
                space = from_orthonormal(null)
                dx = solve_flat(A, rhs, problem.solver, nullspace=space, throw=True).value
        else:
            nothing = (
                jnp.zeros(3, rhs.dtype),
                jnp.zeros(0, rhs.dtype),
                rhs,
                jnp.zeros_like(rhs),
                null,
                link,
            )
            dx, *_ = operator_solve_p.bind(
                *at_x, *nothing, forward=forward, inverse=None, counts=(len(at_x), 0),
                solver=problem.solver, null_check="", prepares=False, fields=(), throw=True,
                site=params["site"], comm=problem.comm,
            )  # fmt: skip
        return [dx, None]

    return [x, info], (constants, at_x, null, link), tangent


newton_p = primitive(
    "newton",
    shapes=lambda *operands, **_: [operands[-3], jax.ShapeDtypeStruct((INFO,), operands[-3].dtype)],
    run=_run,
    differentiate=_differentiate,
    undifferentiated=(1,),
    batch="map",
)
