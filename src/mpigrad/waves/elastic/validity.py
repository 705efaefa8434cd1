"""Checks of elastic models before the first step, on all ranks."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.operations import allreduce, require
from mpigrad.waves.elastic.attenuation import Lame, low_q_text, smallest
from mpigrad.waves.relaxation import Relaxation
from mpigrad.waves.stability import limiting_square

__all__ = ["largest_step", "require_factors", "require_stable"]

INVALID = (
    "{modulus} and the density must be positive, mu must not be negative, and all must be "
    "finite. In this model the smallest {modulus} is {{}}, the smallest mu {{}}, the smallest "
    "density {{}}, and the largest vp squared {{}}. Check the model."
)
UNSTABLE = (
    "the time step {} is not stable: the largest stable one is {} for P velocities up to {}, "
    "densities down to {} and lambda + 2 mu up to {}. Use that time step and more steps, a coarser "
    "grid, or a larger density in the lightest cells."
)

Moduli = tuple[Lame, Lame]  # unrelaxed and relaxed


def require_factors(relaxation: Relaxation, qp: Any, qs: Any, comm: Communicator) -> None:
    """Raise a RuntimeError on all ranks at run time if a quality factor is too small or NaN."""
    local = jnp.stack([-jax.lax.stop_gradient(smallest(q)) for q in (qp, qs)])
    low = -allreduce(local, op=MPI.MAX, comm=comm)
    valid = jnp.all(low > relaxation.smallest_q)
    require(valid, low_q_text(relaxation), low[0], low[1], comm=comm)


def require_stable(
    moduli: Moduli, rho: jax.Array, dt: float, stable_length: float, comm: Communicator
) -> tuple[jax.Array, jax.Array]:
    """Check a model at run time, and return the largest stable step and the largest P velocity.

    A model that is not valid or not stable is a RuntimeError on all ranks.
    """
    local = _extremes(*jax.lax.stop_gradient((moduli, rho)))
    extremes = allreduce(local, op=MPI.MAX, comm=comm)
    require(_is_valid(extremes), _invalid_text(rho.ndim), *_values(extremes), comm=comm)
    limit = stable_length / jnp.sqrt(_square(extremes))
    vp, light, stiff = jnp.sqrt(extremes[3]), -extremes[2], extremes[4]
    stable = dt <= limit * (1 + 1e-6)
    require(stable, UNSTABLE, dt, limit, vp, light, stiff, comm=comm)
    return limit, vp


def largest_step(
    name: str, moduli: Moduli, rho: jax.Array, stable_length: float, comm: Communicator
) -> float:
    """Return the largest stable step, or raise a ValueError of `name` on all ranks."""
    local = np.asarray(_extremes(moduli, rho))
    extremes = np.max(comm.mpi.allgather(local), axis=0)
    if not _is_valid(extremes):
        raise ValueError(f"{name}: {_invalid_text(rho.ndim).format(*_values(extremes))}")
    return stable_length / math.sqrt(_square(extremes))


def _invalid_text(axes: int) -> str:
    return INVALID.format(modulus="lambda + mu" if axes == 2 else "lambda + 2/3 mu")


def _extremes(moduli: Moduli, rho: Any) -> jax.Array:
    """Return the largest -lambda - 2 mu / axes, -mu, -rho, vp^2 and lambda + 2 mu of a tile."""

    def largest(lam: Any, mu: Any) -> jax.Array:
        stiffness = lam + 2 * mu
        values = (-(lam + (2 / lam.ndim) * mu), -mu, -rho, stiffness / rho, stiffness)
        # MPI's maximum may lose a NaN, and the maximum of -rho would lose an infinite density.
        return jnp.stack([jnp.max(jnp.where(jnp.isfinite(v), v, jnp.inf)) for v in values])

    unrelaxed, relaxed = moduli
    if relaxed is unrelaxed:
        return largest(*unrelaxed)
    return jnp.maximum(largest(*unrelaxed), largest(*relaxed))


def _square(extremes: Any) -> Any:
    return limiting_square(extremes[3], -extremes[2], extremes[4])


def _is_valid(extremes: Any) -> Any:
    bulk, shear, density, square, _ = extremes
    return (bulk < 0) & (shear <= 0) & (density < 0) & (square < np.inf)


def _values(extremes: Any) -> tuple[Any, ...]:
    return -extremes[0], -extremes[1], -extremes[2], extremes[3]
