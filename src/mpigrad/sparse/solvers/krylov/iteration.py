"""Run a solver's iterations on a linear system, and judge the vector that they return."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.operations.carrier import mark_common_branch
from mpigrad.solution import Result
from mpigrad.sparse.solvers.base import LinearSolver
from mpigrad.sparse.solvers.krylov.system import RUNNING, LinearSystem, Outcome

__all__ = ["solve_system"]


def solve_system(solver: LinearSolver, system: LinearSystem) -> tuple[jax.Array, jax.Array]:
    """Return x of shape (n_local,), and the info of shape (INFO,)."""
    end = solver.iterate(system) if solver.judges_residual else _judged(solver, system)
    assert isinstance(end, Outcome)
    residual = jnp.where(end.bb > 0, jnp.sqrt(end.rr / end.bb), 0)
    valid = False
    for result in (
        Result.SUCCESSFUL, Result.MAX_STEPS_REACHED, Result.STAGNATED, Result.INACCURATE,
    ):  # fmt: skip
        valid |= end.result == result
    x = jnp.where(valid, end.x, jnp.nan)
    none = 0 * residual
    numbers = (end.result, end.num_steps, residual, none, none)
    return x, jnp.stack([v.astype(residual.dtype) for v in numbers])


def _judged(solver: LinearSolver, system: LinearSystem) -> Outcome:
    """Run a user's iterations and compute the residual of their result, whatever they report."""
    if solver.symmetric:
        bb, _, state = system.begin_symmetric()
    else:
        bb, _, state, _ = system.begin()

    def run() -> tuple[jax.Array, jax.Array, jax.Array]:
        x, num_steps = _checked(solver, system, solver.iterate(system))
        r = system.b - system.product(x)
        return x, num_steps, system.dots((r, r))[0].real

    def skip() -> tuple[jax.Array, jax.Array, jax.Array]:  # x = 0 solves A x = 0
        return jnp.zeros_like(system.b), jnp.zeros((), "int32"), jnp.zeros_like(bb)

    x, num_steps, rr = jax.lax.cond((state == RUNNING) & (bb > 0), mark_common_branch(run), skip)
    # The residual that the solver has computed may differ from this one by rounding.
    goal = (system.rtol + 10 * jnp.finfo(bb.dtype).eps) ** 2 * bb
    result = jnp.where(num_steps >= system.max_steps, Result.MAX_STEPS_REACHED, Result.INACCURATE)
    result = jnp.where(rr <= goal, Result.SUCCESSFUL, result)
    result = jnp.where(jnp.isfinite(rr), result, Result.BREAKDOWN)
    result = jnp.where(state == RUNNING, result, state).astype("int32")
    return Outcome(x, rr, bb, num_steps, result)


def _checked(solver: LinearSolver, system: LinearSystem, end: Any) -> tuple[jax.Array, jax.Array]:
    """Check the types and shapes of the values that `iterate` returned."""
    name = type(solver).__name__
    if isinstance(end, Outcome):
        return end.x, jnp.asarray(end.num_steps, "int32")
    if not isinstance(end, tuple) or len(end) != 2:
        raise TypeError(
            f"solve: {name}.iterate must return the pair (x, num_steps), got "
            f"{type(end).__name__}. Return the solution and the number of steps."
        )
    x, num_steps = jnp.asarray(end[0]), jnp.asarray(end[1])
    if x.shape != system.b.shape or x.dtype != system.b.dtype:
        raise ValueError(
            f"solve: {name}.iterate must return x like b, {system.b.dtype}"
            f"{list(system.b.shape)}, got {x.dtype}{list(x.shape)} on rank {system.comm.rank}. "
            "Return this rank's part of the solution."
        )
    if num_steps.shape != () or not jnp.issubdtype(num_steps.dtype, jnp.integer):
        raise TypeError(
            f"solve: {name}.iterate must return num_steps as an integer scalar, got "
            f"{num_steps.dtype}{list(num_steps.shape)}. Count the steps in the loop's state."
        )
    return x, num_steps.astype("int32")
