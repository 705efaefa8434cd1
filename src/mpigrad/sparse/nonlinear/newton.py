"""Nonlinear systems by Newton's method, differentiated by the implicit function theorem.

One primitive carries F and its Jacobian as jaxprs of (constants..., link, x, arguments...), where
`link` is the carrier of their messages. Its derivative is one linear solve at the solution,
whatever the iterations were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from mpigrad.communicator import Communicator, resolve
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import ShapedArray, ad
from mpigrad.operations.carrier import CARRIER, carrier, opaque_zero, set_carrier, without_carriers
from mpigrad.runtime.call_sites import call_site, describe
from mpigrad.sparse.matrix.matrix import Matrix
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.nonlinear.newton_steps import INFO, Problem, iterate, require_solution, summary
from mpigrad.sparse.nonlinear.sparse_jacobian import sparse_jacobian
from mpigrad.sparse.solvers.base import LinearSolver
from mpigrad.sparse.solvers.hypre_library import hypre_available
from mpigrad.sparse.solvers.implicit import implicit_primitive
from mpigrad.sparse.solvers.krylov import noise
from mpigrad.sparse.solvers.methods import GMRES
from mpigrad.sparse.solvers.operator_solve import linearized, operator_solve_p
from mpigrad.sparse.solvers.preconditioners import BoomerAMG, Jacobi
from mpigrad.sparse.solvers.solve import Solution, solve

__all__ = ["newton"]

_LINK = np.float32(0)
_Zero: Any = ad.Zero  # pyright: ignore[reportPrivateImportUsage]


def newton(
    F: Callable[..., Any],
    x0: Any,
    *args: Any,
    pattern: Pattern | None = None,
    jacobian: Callable[..., Matrix] | None = None,
    solver: LinearSolver | None = None,
    rtol: float = 1e-8,
    atol: float = 0.0,
    max_steps: int = 50,
    throw: bool = True,
    comm: Communicator | None = None,
) -> Solution:
    """Solve F(x, *args) = 0 (collective).

    Newton's method; a step is halved until the residual decreases enough (Armijo 1966), which all
    ranks decide alike. Differentiable in `args` and in whatever `F` closes over, in forward and
    reverse mode and to any order, but not through the iterations: dx = -J⁻¹ dF, and the adjoint
    is one solve with Jᵀ. No derivative is taken with respect to `x0`.

    Parameters
    ----------
    F
        F(x, *args) on this rank's part of x: an array of the shape and dtype of x. Messages may
        stand inside.
    x0
        Where the iterations start: this rank's part, an array of any shape, real.
    args
        Arrays, or pytrees of arrays.
    pattern
        Where dF/dx has entries, its rows and columns numbered as x is in C order on each rank. The
        Jacobian is computed by `sparse_jacobian`.
    jacobian
        Or the Jacobian itself: jacobian(x, *args) -> Matrix. It must be the exact derivative, which
        is checked along a random vector in each step. Without both, the linear systems are solved
        matrix-free, with derivatives of F along vectors.
    solver
        For the linear systems; default: GMRES, with multigrid where hypre is available, else with
        Jacobi's preconditioner; without one where there is no matrix.
    rtol, atol
        Stop where |F(x)| <= max(atol, rtol |F(x0)|), in the two-norm over all ranks. Give `atol`
        where x0 may be a solution already.
    max_steps
        Most Newton steps.
    throw
        Raise an error on every rank where no solution is found: no convergence, NaN, a singular
        Jacobian. With `throw=False`, look at `Solution.result`.
    comm
        The ranks among which x is distributed; that of the Jacobian's pattern where there is one.

    Returns
    -------
    `Solution`: `value` of the shape of x0, and in `stats` `iterations`, `residual` |F(x)|,
    `relative_residual` |F(x)| / |F(x0)| and `linear_iterations` (of all linear solves): equal on
    all ranks.
    """
    x0 = jnp.asarray(x0)
    _check(x0, pattern, jacobian, rtol, atol, max_steps)
    flat = x0.reshape(-1)
    leaves, structure = jax.tree.flatten(args)
    leaves = [jnp.asarray(leaf) for leaf in leaves]

    def residual(x: Any, *leaves: Any) -> Any:
        y = jnp.asarray(F(x.reshape(x0.shape), *jax.tree.unflatten(structure, leaves)))
        if y.shape != x0.shape or y.dtype != x0.dtype:
            raise ValueError(
                f"newton: F returns {y.dtype}{list(y.shape)} for x of {x0.dtype}{list(x0.shape)}; "
                "they must be alike"
            )
        return y.reshape(-1)

    def matrix(x: Any, *leaves: Any) -> Matrix:
        A = jacobian(x.reshape(x0.shape), *jax.tree.unflatten(structure, leaves))  # type: ignore
        if not isinstance(A, Matrix):
            raise TypeError(f"newton: jacobian must return a Matrix, not {type(A).__name__}")
        return A

    if jacobian is None and pattern is not None:
        jacobian = sparse_jacobian(F, pattern)
    F_jaxpr, F_constants, _ = _traced(residual, flat, leaves)
    J_jaxpr, J_constants = None, []
    if jacobian is not None:
        J_jaxpr, J_constants, shape = _traced(matrix, flat, leaves)
        _check_pattern(shape.pattern, flat)
        pattern = shape.pattern
    problem = Problem(
        F_jaxpr,
        J_jaxpr,
        (len(F_constants), len(J_constants)),
        pattern,
        resolve(comm) if pattern is None else pattern.comm,
        _default_solver(pattern, flat.dtype) if solver is None else solver,
    )
    x, info = newton_p.bind(
        *F_constants,
        *J_constants,
        *leaves,
        jax.lax.stop_gradient(flat),
        carrier(),
        problem=problem,
        rtol=float(rtol),
        atol=float(atol),
        max_steps=int(max_steps),
        throw=bool(throw),
        site=call_site(),
    )
    return Solution(
        value=x.reshape(x0.shape),
        result=info[0].astype("int32"),
        stats={
            "iterations": info[1].astype("int32"),
            "relative_residual": info[2],
            "residual": info[3],
            "linear_iterations": info[4].astype("int32"),
        },
    )


def _check(x0: Any, pattern: Any, jacobian: Any, rtol: Any, atol: Any, max_steps: Any) -> None:
    if not jnp.issubdtype(x0.dtype, jnp.floating):
        raise TypeError(f"newton: x0 has dtype {x0.dtype}; give real floating-point numbers")
    if pattern is not None and jacobian is not None:
        raise ValueError("newton: give a pattern or a jacobian, not both")
    if not (0 <= rtol < 1 and atol >= 0 and rtol + atol > 0):
        raise ValueError(
            f"newton: rtol={rtol} must lie between 0 and 1 and atol={atol} must not be negative; "
            "one of them is positive"
        )
    if not 0 < max_steps < 2**31:
        raise ValueError(f"newton: max_steps={max_steps} must be positive and below 2**31")
    if pattern is not None:
        _check_pattern(pattern, x0)


def _check_pattern(pattern: Pattern, x: Any) -> None:
    if not pattern.n_local == pattern.n_local_columns == x.size:
        raise ValueError(
            f"newton: x0 has {x.size} entries on rank {pattern.comm.rank}, where the Jacobian's "
            f"pattern has {pattern.n_local} rows and {pattern.n_local_columns} columns"
        )


def _default_solver(pattern: Pattern | None, dtype: Any) -> LinearSolver:
    if pattern is None:
        return GMRES(preconditioner=None)
    if hypre_available() and dtype == np.float64:
        return GMRES(preconditioner=BoomerAMG())
    return GMRES(preconditioner=Jacobi(), max_steps=10_000)


# ---- F and its Jacobian as jaxprs ----


def _traced(f: Callable[..., Any], x: Any, leaves: Sequence[Any]) -> tuple[Any, list[Any], Any]:
    """The jaxpr of (constants..., link, x, leaves...), the constants, the shape of the result."""

    def linked(link: Any, x: Any, *leaves: Any) -> Any:
        with set_carrier(link):
            return f(x, *leaves)

    closed, shape = jax.make_jaxpr(linked, return_shape=True)(_LINK, x, *leaves)
    return *compat.constants_as_operands(closed), shape


# ---- the primitive: (constants..., leaves..., x0, carrier) -> x, info ----


def _run(
    *operands: Any,
    problem: Problem,
    rtol: float,
    atol: float,
    max_steps: int,
    throw: bool,
    site: int,
) -> Any:
    *parameters, x0, _ = operands
    with without_carriers():  # differentiation has happened: these messages carry values only
        end = iterate(problem, parameters, x0, rtol, atol, max_steps)
        info = summary(end)
        if throw:
            head = f"newton, {describe(site)}: "
            require_solution(info, head, problem, rtol, atol, max_steps)
    return end.x, info


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any]
) -> tuple[list[Any], Any, Callable[..., Any]]:
    """The primal results, what the tangent map needs of them, and the tangent map."""
    x, info = newton_p.bind(*operands, **params)
    problem: Problem = params["problem"]
    *parameters, _, a = operands
    varying = [
        i for i, p in enumerate(parameters) if jnp.issubdtype(jnp.result_type(p), np.inexact)
    ]
    link = a + opaque_zero(x, CARRIER)  # active wherever x is

    def residual(link: Any, *values: Any) -> Any:
        every = list(parameters)
        for i, value in zip(varying, values, strict=True):
            every[i] = value
        return problem.F(link, x, every)

    values = [parameters[i] for i in varying]
    _, derivative = jax.linearize(residual, link, *values)
    moved, constants = compat.constants_as_operands(jax.make_jaxpr(derivative)(_LINK, *values))
    forward = None
    if problem.pattern is None:
        probe = noise(problem.comm.rank << 20, x.shape[0], x.dtype, 2654435761)
        forward, at_x, _ = linearized(problem.along(x, parameters), probe, link)
    else:
        at_x = [problem.J(link, x, parameters)]

    def tangent(kept: Any, tangents: Sequence[Any]) -> list[Any]:
        constants, at_x, link = kept
        *changes, _, ta = tangents
        changes = [ad.instantiate_zeros(changes[i]) for i in varying]
        ta = ad.instantiate_zeros(ta)
        rhs = -eval_jaxpr(moved, (), *constants, ta, *changes)[0]
        rhs = rhs + opaque_zero(ta, jax.typeof(rhs))  # active on every rank
        if forward is None:
            assert problem.pattern is not None
            with set_carrier(link):
                dx = solve(Matrix(problem.pattern, at_x[0]), rhs, problem.solver).value
        else:
            nothing = jnp.zeros(2, rhs.dtype), rhs, jnp.zeros_like(rhs), link
            dx, _ = operator_solve_p.bind(
                *at_x, *nothing, forward=forward, inverse=None, counts=(len(at_x), 0),
                solver=problem.solver, throw=True, site=params["site"], comm=problem.comm,
            )  # fmt: skip
        return [dx, _Zero(compat.tangent_aval(info))]

    return [x, info], (constants, at_x, link), tangent


newton_p = implicit_primitive(
    "newton",
    shapes=lambda *operands, **_: [operands[-2], ShapedArray((INFO,), operands[-2].dtype)],
    run=_run,
    differentiate=_differentiate,
)
