"""Loss of elastic waves by standard linear solids, and checks of models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.extend import Array, Float
from mpigrad.operations import allreduce, require
from mpigrad.waves.arguments import limiting_square
from mpigrad.waves.elastic.media import Media, Tile
from mpigrad.waves.relaxation import Relaxation

__all__ = [
    "Lame",
    "Loss",
    "largest_step",
    "loss_of",
    "low_q_text",
    "moduli",
    "relax",
    "require_factors",
    "require_stable",
    "smallest",
    "step_constants",
]

# ---- Loss of elastic waves by standard linear solids ----
#
# The stress of a modulus M is that of the unrelaxed modulus M_U (of infinite frequency) less the
# part that has relaxed: with the sum B of the weights b_l of the mechanisms and the strain rates
# e,
#
#     rate of stress = M_U e - (M_U - M_R) / B times the sum of b_l r_l,    t_l r_l' + r_l = e
#
# with the relaxed (static) modulus M_R. The memories r_l are strain rates, so they are the same
# for both moduli, and do not depend on the model. In a step r_l is the mean of its values before
# and after it (the trapezoidal rule), which never adds energy and leaves the largest stable step
# of the unrelaxed moduli as it is. As Robertsson, Blanch and Symes ("Viscoelastic finite-
# difference modeling", Geophysics 59, 1994) and Bohlen ("Parallel 3-D viscoelastic finite
# difference seismic modelling", Computers & Geosciences 28, 2002), with memories of strain
# instead of stress.


class Lame(NamedTuple):
    """The Lame parameters of a tile."""

    lam: Array
    mu: Array


class Loss(NamedTuple):
    """(M_U - M_R) / B for the moduli of `Media`."""

    bulk: Tile
    shear: Tile
    shears: tuple[Tile, ...]


def moduli(
    relaxation: Relaxation | None,
    frequency: float,
    given: Lame,
    qp: Float[Array, "*tile"] | None,
    qs: Float[Array, "*tile"] | None,
) -> tuple[Lame, Lame]:
    """Return the unrelaxed and the relaxed parameters of those at a frequency in Hz.

    The phase velocities at the frequency are those of `given`. Without a quality factor, a modulus
    has no loss.
    """
    if relaxation is None:
        return given, given

    def pair(modulus: Array, q: Array | None) -> tuple[Array, Array]:
        if q is None:
            return modulus, modulus
        unrelaxed = modulus * relaxation.unrelaxed_square(q, frequency)
        return unrelaxed, modulus * relaxation.relaxed_square(q, frequency)

    stiffness, shear = pair(given.lam + 2 * given.mu, qp), pair(given.mu, qs)
    unrelaxed, relaxed = (Lame(p - 2 * mu, mu) for p, mu in zip(stiffness, shear, strict=True))
    return unrelaxed, relaxed


def loss_of(relaxation: Relaxation, unrelaxed: Media, relaxed: Media) -> Loss:
    """Return the loss of moduli that were averaged to the points of the stresses."""
    total = sum(relaxation.weights)
    part = jax.tree.map(lambda u, r: (u - r) / total, tuple(unrelaxed[:3]), tuple(relaxed[:3]))
    return Loss(*part)


def relax(
    relaxation: Relaxation, dt: float, memory: Float[Array, ...], rates: Sequence[jax.Array]
) -> tuple[list[jax.Array], Float[Array, ...]]:
    """Return the sum of b_l r_l for each strain rate at the middle of a step, and the next memory.

    Parameters
    ----------
    memory
        The r_l, shape (shots, mechanisms, len(rates), *cells).
    """
    strain = jnp.stack(rates, axis=1)[:, None]
    keep, gain, half = (
        jnp.asarray(x.reshape(-1, *(1,) * (memory.ndim - 2)), memory.dtype)
        for x in step_constants(relaxation, dt)
    )
    following = keep * memory + gain * strain
    mean = jnp.sum(half * (memory + following), axis=1)
    return [mean[:, k] for k in range(len(rates))], following


def step_constants(relaxation: Relaxation, dt: float) -> tuple[np.ndarray, ...]:
    """Return for each mechanism what a step keeps of r_l, what it takes of e, and b_l / 2."""
    times, weights = np.asarray(relaxation.times), np.asarray(relaxation.weights)
    a = dt / (2 * times)
    return (1 - a) / (1 + a), 2 * a / (1 + a), weights / 2


def smallest(q: Float[Array, "*tile"] | None) -> Any:
    """Return the smallest quality factor of a tile: -inf with a NaN, infinity without factors."""
    return jnp.inf if q is None else jnp.min(jnp.where(jnp.isnan(q), -jnp.inf, q))


def low_q_text(relaxation: Relaxation) -> str:
    """Return the text of the error about quality factors, with places for the smallest ones."""
    return (
        f"quality factors must be larger than {relaxation.smallest_q:.4g}, the limit of this "
        "relaxation, and not NaN, but the smallest qp is {} and the smallest qs {} (-inf stands "
        "for NaN). Use infinity for cells without loss, and fit the relaxation for smaller "
        "factors."
    )


# ---- Checks of elastic models before the first step, on all ranks ----


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
    moduli: Moduli,
    rho: jax.Array,
    dt: float,
    order: int,
    surface: bool,
    stable_length: float,
    comm: Communicator,
) -> tuple[jax.Array, jax.Array]:
    """Check a model at run time, and return the largest stable step and the largest P velocity.

    A model that is not valid or not stable is a RuntimeError on all ranks.
    """
    local = _extremes(*jax.lax.stop_gradient((moduli, rho)))
    extremes = allreduce(local, op=MPI.MAX, comm=comm)
    require(_is_valid(extremes), _invalid_text(rho.ndim), *_values(extremes), comm=comm)
    limit = stable_length / jnp.sqrt(_square(order, surface, extremes))
    vp, light, stiff = jnp.sqrt(extremes[3]), -extremes[2], extremes[4]
    stable = dt <= limit * (1 + 1e-6)
    require(stable, UNSTABLE, dt, limit, vp, light, stiff, comm=comm)
    return limit, vp


def largest_step(
    name: str,
    moduli: Moduli,
    rho: jax.Array,
    order: int,
    surface: bool,
    stable_length: float,
    comm: Communicator,
) -> float:
    """Return the largest stable step, or raise a ValueError of `name` on all ranks."""
    local = np.asarray(_extremes(moduli, rho))
    extremes = np.max(comm.mpi.allgather(local), axis=0)
    if not _is_valid(extremes):
        raise ValueError(f"{name}: {_invalid_text(rho.ndim).format(*_values(extremes))}")
    return stable_length / math.sqrt(_square(order, surface, extremes))


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


def _square(order: int, surface: bool, extremes: Any) -> Any:
    return limiting_square(order, surface, extremes[3], -extremes[2], extremes[4])


def _is_valid(extremes: Any) -> Any:
    bulk, shear, density, square, _ = extremes
    return (bulk < 0) & (shear <= 0) & (density < 0) & (square < np.inf)


def _values(extremes: Any) -> tuple[Any, ...]:
    return -extremes[0], -extremes[1], -extremes[2], extremes[3]
