"""The iterations of Newton's method, and their errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from mpigrad.communicator import Communicator
from mpigrad.extend import mark_common_branch, noise, outer_carrier, two_norms
from mpigrad.operations import require
from mpigrad.solution import Result, Solution
from mpigrad.sparse.matrix.blocks import Blocks
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.krylov import RUNNING
from mpigrad.sparse.solvers.methods import LinearSolver
from mpigrad.sparse.solvers.nullspace import NullSpace, from_orthonormal, projected
from mpigrad.sparse.solvers.operator_solve import Operator
from mpigrad.sparse.solvers.solve import solve

__all__ = ["INFO", "Problem", "iterate", "require_solution", "solve_flat", "summary"]

INFO = 7
_LINK = np.float32(0)
_SHORTEST = 2.0**-12  # the shortest step
_LOAD_STEPS = (
    "Apply a large load in load steps, each from the solution of the step before (docs/fem.md)."
)
_DECREASE = 1e-4  # the fraction of the linear model's decrease that a step must reach


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """F and its Jacobian, functions of a link, x and parameters (all constants and arguments)."""

    F_jaxpr: Any
    J_jaxpr: Any
    counts: tuple[int, int]
    pattern: Pattern | None
    comm: Communicator
    solver: LinearSolver
    tree: Any  # of the Jacobian, a Matrix or Blocks

    def F(self, link: Any, x: Any, parameters: Sequence[Any]) -> Any:
        """Return F(x)."""
        n, m = self.counts
        constants, leaves = parameters[:n], parameters[n + m :]
        return eval_jaxpr(self.F_jaxpr, (), *constants, link, x, *leaves)[0]

    def J(self, link: Any, x: Any, parameters: Sequence[Any]) -> Any:
        """Return the values of the Jacobian, a list."""
        n, m = self.counts
        constants, leaves = parameters[n : n + m], parameters[n + m :]
        return eval_jaxpr(self.J_jaxpr, (), *constants, link, x, *leaves)

    def along(self, x: Any, parameters: Sequence[Any]) -> Callable[[Any], Any]:
        """Return v -> J v. Every message has its derivative, even if F ignores x on this rank."""

        def product(v: Any) -> Any:
            def at(link: Any, x: Any) -> Any:
                return self.F(link, x, parameters)

            return jax.jvp(at, (outer_carrier(), x), (_LINK, v))[1]

        return product


def solve_flat(
    A: Any, b: jax.Array, solver: LinearSolver, *, nullspace: NullSpace | None, throw: bool
) -> Solution:
    """Solve with a matrix, a function or blocks, whose fields follow each other in b and x."""
    if not isinstance(A, Blocks):
        return solve(A, b, solver, nullspace=nullspace, throw=throw)
    if nullspace is not None:
        vectors, left = (
            None if v is None else [A.split(z) for z in v]
            for v in (nullspace.vectors, nullspace.left)
        )
        nullspace = dataclasses.replace(nullspace, vectors=vectors, left=left)
    solution = solve(A, A.split(b), solver, nullspace=nullspace, throw=throw)
    return dataclasses.replace(solution, value=A.joined(solution.value))


class _Iterate(NamedTuple):
    x: jax.Array
    d: jax.Array  # the next trial is x - t d
    t: jax.Array
    norm: jax.Array  # |F(x)|, infinite before the first evaluation
    norm0: jax.Array
    steps: jax.Array
    linear_steps: jax.Array
    # Result and relative residual of the last linear solve. INCONSISTENT: |F| outside the range.
    linear: jax.Array
    state: jax.Array


def iterate(
    problem: Problem,
    parameters: list[Any],
    x0: Any,
    null: Any,
    rtol: float,
    atol: float,
    max_steps: int,
    project: bool,
) -> _Iterate:
    """Take Newton steps from x0 until one of the ends of `Result` is reached.

    `null` has orthonormal null vectors of the Jacobian, shape (1 or 2, k, n).
    """
    comm, dtype = problem.comm, x0.dtype
    singular = null.shape[1] > 0

    def without(vectors: Any, v: Any) -> Any:
        return projected(vectors[None], v[None], comm)[0] if singular else v

    def direction(x: Any, r: Any) -> tuple[Any, ...]:
        """Return J⁻¹ r, the number of linear steps, and the solve's result and residual."""
        along = problem.along(x, parameters)
        wrong = jnp.zeros((), bool)
        if problem.pattern is None:
            A = Operator(along, comm=comm)
        else:
            A = jax.tree.unflatten(problem.tree, problem.J(_LINK, x, parameters))
            probe = noise(problem.pattern.offset, x.shape[0], dtype, 2654435761)
            product = along(probe)
            whole = A.merged() if isinstance(A, Blocks) else A
            defect, size = two_norms(whole @ probe - product, product, comm=comm)
            wrong = defect > jnp.finfo(dtype).eps ** 0.5 * size
        space = from_orthonormal(null)
        solution = solve_flat(A, r, problem.solver, nullspace=space, throw=False)
        result = jnp.where(wrong, Result.WRONG_JACOBIAN, solution.result).astype(dtype)
        linear = jnp.stack([result, solution.stats["relative_residual"]])
        return solution.value, solution.stats["num_steps"], linear

    def step(i: _Iterate) -> _Iterate:
        x = i.x - i.t * i.d
        whole = problem.F(_LINK, x, parameters)
        r = without(null[-1], whole)
        norm, excess = two_norms(r, whole - r, comm=comm)
        first = jnp.isinf(i.norm)
        norm0 = jnp.where(first, norm, i.norm0)
        better = jnp.where(first, jnp.isfinite(norm), norm <= (1 - _DECREASE * i.t) * i.norm)
        done = better & (norm <= jnp.maximum(atol, rtol * norm0))
        late = better & ~done & (i.steps >= max_steps)
        go = better & ~done & ~late
        stay = (i.d, jnp.zeros((), "int32"), i.linear)
        d, linear_steps, linear = jax.lax.cond(
            go, mark_common_branch(lambda: direction(x, r)), lambda: stay
        )
        t = jnp.where(better, 1, i.t / 2).astype(dtype)

        state = jnp.where(~better & (t < _SHORTEST), Result.STAGNATED, RUNNING)
        state = jnp.where(first & ~better, Result.NOT_FINITE, state)
        failed = jnp.where(
            linear[0] == Result.WRONG_JACOBIAN, Result.WRONG_JACOBIAN, Result.LINEAR_SOLVE_FAILED
        )
        state = jnp.where(go & (linear[0] != Result.SUCCESSFUL), failed, state)
        state = jnp.where(late, Result.MAX_STEPS_REACHED, state)
        state = jnp.where(done, Result.SUCCESSFUL, state)
        if singular and not project:  # this part is the same at all x
            rounding = 100 * float(jnp.finfo(dtype).eps)
            outside = first & better & (excess > jnp.maximum(atol, max(rtol, rounding) * norm))
            state = jnp.where(outside, Result.INCONSISTENT, state)
            linear = jnp.where(outside, jnp.stack([linear[0], excess]), linear)
        return _Iterate(
            jnp.where(better, x, i.x),
            d,
            t,
            jnp.where(better | first, norm, i.norm),
            norm0,
            i.steps + go,
            i.linear_steps + linear_steps,
            linear,
            state.astype("int32"),
        )

    zero, none = jnp.zeros((), dtype), jnp.zeros((), "int32")
    start = _Iterate(
        without(null[0], x0), jnp.zeros_like(x0), zero,
        jnp.full((), jnp.inf, dtype), zero, none, none,
        jnp.zeros(2, dtype), jnp.full((), RUNNING, "int32"),
    )  # fmt: skip
    return jax.lax.while_loop(lambda i: i.state == RUNNING, step, start)


def summary(end: _Iterate) -> jax.Array:
    """Return the info of shape (INFO,).

    Its entries are `Result`, steps, relative and absolute residual, the steps of all linear solves,
    and `Result` and relative residual of the last linear solve.
    """
    relative = jnp.where(end.norm0 > 0, end.norm / end.norm0, 0)
    numbers = (end.state, end.steps, relative, end.norm, end.linear_steps, *end.linear)
    return jnp.stack([jnp.asarray(v).astype(end.x.dtype) for v in numbers])


def require_solution(
    info: jax.Array, head: str, problem: Problem, rtol: float, atol: float, max_steps: int
) -> None:
    """Raise on every rank, with the reason and a remedy, unless `info` holds a success."""
    result, steps, relative, norm, _, linear, linear_residual = info
    comm = problem.comm
    residual = (
        "|F(x)| is {} ({} of |F(x0)|) after {} steps, above the tolerance "
        f"(rtol={rtol:.3g}, atol={atol:.3g})"
    )
    require(
        result != Result.NOT_FINITE,
        f"{head}{Result.NOT_FINITE.message}: F(x0) holds such a value. Look for a division by zero "
        f"or an overflow in F, or start from another x0. {_LOAD_STEPS}",
        comm=comm,
    )
    require(
        result != Result.WRONG_JACOBIAN,
        f"{head}{Result.WRONG_JACOBIAN.message}: along a random vector they differ (step {{}}). "
        "The pattern lacks entries, or `jacobian` is wrong. Compare them with jax.jacfwd(F).",
        steps,
        comm=comm,
    )
    require(
        result != Result.INCONSISTENT,
        f"{head}no x solves F(x) = 0: the part of F(x0) along the left null space is {{}}, and "
        "the rest is {}. Balance the loads, or solve for the rest with "
        "nullspace=NullSpace(..., project=True).",
        linear_residual,
        norm,
        comm=comm,
    )
    failed = result == Result.LINEAR_SOLVE_FAILED
    for cause in Result:
        remedy = (
            "The Jacobian may be singular at x: start from another x0, or take another solver. "
            f"{_LOAD_STEPS}"
        )
        if cause == Result.WRONG_NULLSPACE:
            remedy = (
                "Give vectors z with J z = 0 at every x, and the left ones if J is not symmetric."
            )
        if cause <= Result.NOT_LINEAR or cause in (Result.INACCURATE, Result.WRONG_NULLSPACE):
            require(
                ~(failed & (linear == cause)),
                f"{head}{Result.LINEAR_SOLVE_FAILED.message}: in step {{}}, at |F(x)| = {{}}, "
                f"{problem.solver!r} ended with {cause.name} ({cause.message}), relative residual "
                f"{{}}. {remedy}",
                steps,
                norm,
                linear_residual,
                comm=comm,
            )
    require(
        result != Result.STAGNATED,
        f"{head}no step, however short, makes the residual smaller: {residual}. It may be a local "
        "minimum of |F|, or as small as rounding allows. Start from another x0, or give atol. "
        f"{_LOAD_STEPS}",
        norm,
        relative,
        steps,
        comm=comm,
    )
    require(
        result == Result.SUCCESSFUL,
        f"{head}no convergence: {Result.MAX_STEPS_REACHED.message}, and {residual}. Raise "
        f"max_steps={max_steps}, loosen rtol, or start nearer to the solution. "
        "newton(..., throw=False) returns the last iterate.",
        norm,
        relative,
        steps,
        comm=comm,
    )
