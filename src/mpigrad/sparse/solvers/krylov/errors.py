"""What is said, on every rank, of a solve that failed."""

from __future__ import annotations

import jax
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.operations import require
from mpigrad.sparse.solvers.base import LinearSolver, Result

__all__ = ["require_success"]


def require_success(
    method: LinearSolver, info: jax.Array, comm: Communicator, head: str, *, operator: bool = False
) -> None:
    """Raise on every rank, with the reason and a remedy, unless `info` tells of success."""
    result, steps, residual = info[0], info[1], info[2]
    name = type(method).__name__
    if operator:
        finite = (
            "the right-hand side, or what the operator makes of a finite vector, holds NaN or "
            "infinity."
        )
        symmetric = (
            "the operator is not symmetric; PCG takes symmetric positive definite operators only. "
            "Solve with GMRES() or BiCGStab()."
        )
        indefinite = "the operator (or its `inverse`) is not positive definite."
    else:
        finite = "the matrix or the right-hand side holds NaN or infinity."
        symmetric = (
            "the matrix is not symmetric; this solver takes symmetric positive definite matrices "
            "only. Check that entries (i, j) and (j, i) get the same value, also where i and j "
            "belong to different ranks, or solve with GMRES() or BiCGStab()."
        )
        indefinite = (
            "the matrix is not positive definite. If all its diagonal entries are negative, solve "
            "with -A and -b instead."
        )
    finite += " Look for a division by zero or an overflow in what computes them."
    single = np.dtype(info.dtype) == np.float32
    rounding = f"the tolerance {method.rtol:.3g} is below what rounding in {info.dtype} allows"
    remedy = "rtol=1e-5, or float64" if single else "a larger rtol"
    help_ = f"Raise max_steps={method.max_steps}, loosen rtol, or take a better preconditioner"
    for bad, message in (
        (Result.NOT_FINITE, finite),
        (Result.NOT_POSITIVE_DEFINITE, indefinite),
        (Result.NOT_SYMMETRIC, symmetric),
        (
            Result.NOT_LINEAR,
            "the operator is not linear: f(v) differs from its derivative along v. Leave out "
            "constant terms (bring them to the right-hand side), or take newton for F(x) = 0.",
        ),
    ):
        require(result != bad, head + message, comm=comm)
    for bad, message in (
        (
            Result.BREAKDOWN,
            f"{name} broke down: its numbers overflowed, at the relative residual {{}}, after {{}} "
            "iterations. The matrix may be singular; else take GMRES, or a better preconditioner.",
        ),
        (
            Result.STAGNATED,
            f"{name} did not converge: the relative residual gets no lower than {{}} (after {{}} "
            f"iterations). The matrix is singular, or {rounding} (take {remedy}), or GMRES was "
            "restarted too early (raise restart).",
        ),
        (
            Result.MAX_STEPS_REACHED,
            f"{name} did not converge: the relative residual is {{}} after {{}} iterations, above "
            f"the tolerance {method.rtol:.3g}. {help_}; solve(..., throw=False) returns what was "
            "reached.",
        ),
    ):
        require(result != bad, head + message, residual, steps, comm=comm)
