"""Errors of solves that failed, the same on every rank."""

from __future__ import annotations

import jax
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.operations import require
from mpigrad.solution import Result
from mpigrad.sparse.solvers.base import LinearSolver

__all__ = ["require_success"]


def require_success(
    solver: LinearSolver, info: jax.Array, comm: Communicator, head: str, *, operator: bool = False
) -> None:
    """Raise on every rank, with the reason and a remedy, unless `info` holds a success."""
    result, steps, residual = info[0], info[1], info[2]
    name, single = type(solver).__name__, np.dtype(info.dtype) == np.float32
    kind = "the operator" if operator else "the matrix"
    for failure, text in _wrong_input(operator).items():
        require(result != failure, f"{head}{text}", comm=comm)
    remedy_of_rounding = "rtol=1e-5, or float64 arrays" if single else "a larger rtol"
    values = "the relative residual is {} after {} steps"
    restart = getattr(solver, "restart", None)  # of GMRES
    longer = "" if restart is None else f"restart={restart} or "
    remedy = (
        f"Raise {longer}max_steps={solver.max_steps}, loosen rtol, or take a better preconditioner"
    )
    stagnated, failed = result == Result.STAGNATED, f"{head}{name} did not converge: "
    above = f"{values}, above the tolerance {solver.rtol:.3g}"
    by_rounding = residual <= np.finfo(info.dtype).eps ** 0.5
    by_restart = ~by_rounding & (False if restart is None else steps >= restart)
    for cause, text in (
        (
            by_rounding,
            f"rounding errors allow no smaller residual: {above}. Take {remedy_of_rounding}.",
        ),
        (
            by_restart,
            f"the residual no longer decreases between restarts: {above}. Raise restart={restart}, "
            f"or take a better preconditioner. If {kind} is singular, give its null space as "
            "nullspace=.",
        ),
        (
            ~by_rounding & ~by_restart,
            f"{Result.STAGNATED.message}: {above}. {kind.capitalize()} is singular, or nearly: "
            "give its null space as nullspace=, or check how it is made.",
        ),
    ):
        require(~(stagnated & cause), failed + text, residual, steps, comm=comm)
    for failure, text in {
        Result.BREAKDOWN: (
            f"{name} did not converge: {Result.BREAKDOWN.message}, and {values}. Check that {kind} "
            "is not singular (give nullspace= if it is), or take GMRES or a better preconditioner."
        ),
        Result.INACCURATE: (
            f"{name} did not converge: {Result.INACCURATE.message}, {solver.rtol:.3g}: {values}. "
            f"Check {name}.iterate and the preconditioner."
        ),
        Result.MAX_STEPS_REACHED: (
            f"{name} did not converge: {Result.MAX_STEPS_REACHED.message}, and {values}, above the "
            f"tolerance {solver.rtol:.3g}. {remedy}. solve(..., throw=False) returns the last "
            "iterate."
        ),
    }.items():
        require(result != failure, f"{head}{text}", residual, steps, comm=comm)


def _wrong_input(operator: bool) -> dict[Result, str]:
    """Return the texts for systems that no method can solve."""
    spd = f"PCG needs a symmetric positive definite {'operator' if operator else 'matrix'}"
    if operator:
        finite = "the right-hand side, or the operator's result for a finite vector"
        symmetric = "the operator is not symmetric"
        definite = "the operator (or its `inverse`) is not positive definite"
        entries = negative = ""
    else:
        finite = "the matrix, the right-hand side or x0"
        symmetric = Result.NOT_SYMMETRIC.message
        definite = f"{Result.NOT_POSITIVE_DEFINITE.message} (or the preconditioner is not)"
        entries = (
            "Give entries (i, j) and (j, i) the same value, also if i and j belong to different "
            "ranks, or solve"
        )
        negative = "If all diagonal entries are negative, solve with -A and -b. Otherwise solve"
    return {
        Result.NOT_FINITE: (
            f"{Result.NOT_FINITE.message}: {finite} holds such a value. Look for a division by "
            "zero or an overflow in the code that computes them."
        ),
        Result.NOT_POSITIVE_DEFINITE: f"{definite}, but {spd}. {negative or 'Solve'} with GMRES().",
        Result.NOT_SYMMETRIC: (
            f"{symmetric}, but this solver needs a symmetric one. {entries or 'Solve'} with "
            "GMRES() or BiCGStab()."
        ),
        Result.NOT_LINEAR: (
            f"{Result.NOT_LINEAR.message}: f(v) differs from its derivative along v. Bring "
            "constant terms to the right-hand side, or use newton for F(x) = 0."
        ),
    }
