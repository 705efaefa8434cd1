"""From a method's settings to its iterations, and from where they end to a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.sparse.solvers.base import LinearSolver, Result
from mpigrad.sparse.solvers.krylov.bicgstab import bicgstab
from mpigrad.sparse.solvers.krylov.conjugate_gradients import pcg
from mpigrad.sparse.solvers.krylov.gmres import gmres
from mpigrad.sparse.solvers.krylov.system import Outcome, System

__all__ = ["ITERATIONS", "iterate"]


def iterate(method: LinearSolver, system: System) -> tuple[jax.Array, jax.Array]:
    """(x of shape (n_local,), info of shape (INFO,)) as of `LinearSolver.run`."""
    end = ITERATIONS[type(method).__name__](method, system)
    residual = jnp.where(end.size > 0, jnp.sqrt(end.rr / end.size), 0)
    valid = False
    for result in (Result.SUCCESSFUL, Result.MAX_STEPS_REACHED, Result.STAGNATED):
        valid |= end.result == result
    x = jnp.where(valid, end.x, jnp.nan)
    none = 0 * residual
    numbers = (end.result, end.steps, residual, none, none)
    return x, jnp.stack([v.astype(residual.dtype) for v in numbers])


# By name: the methods' module stands above this one.
ITERATIONS: dict[str, Callable[[Any, System], Outcome]] = {
    "PCG": lambda method, system: pcg(system),
    "GMRES": lambda method, system: gmres(system, method.restart),
    "BiCGStab": lambda method, system: bicgstab(system),
}
