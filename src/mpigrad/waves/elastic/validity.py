"""Checks of elastic models before the first step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.waves.stability import limiting_square

__all__ = ["UNSTABLE", "extremes_of", "invalid_text", "is_valid", "square_of", "values_of"]

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


def invalid_text(axes: int) -> str:
    """Return the text of the error about models that are not valid, with places for values."""
    return INVALID.format(modulus="lambda + mu" if axes == 2 else "lambda + 2/3 mu")


def extremes_of(lam: Any, mu: Any, rho: Any) -> jax.Array:
    """Return the largest -lambda - 2 mu / axes, -mu, -rho, vp^2 and lambda + 2 mu of a tile."""
    stiffness = lam + 2 * mu
    values = (-(lam + (2 / lam.ndim) * mu), -mu, -rho, stiffness / rho, stiffness)
    # MPI's maximum may lose a NaN, and the maximum of -rho would lose an infinite density.
    return jnp.stack([jnp.max(jnp.where(jnp.isfinite(v), v, jnp.inf)) for v in values])


def square_of(extremes: Any) -> Any:
    """Return the square of the velocity that limits the time step."""
    return limiting_square(extremes[3], -extremes[2], extremes[4])


def is_valid(extremes: Any) -> Any:
    """Return whether a model with these extremes is valid."""
    bulk, shear, density, square, _ = extremes
    return (bulk < 0) & (shear <= 0) & (density < 0) & (square < np.inf)


def values_of(extremes: Any) -> tuple[Any, ...]:
    """Return the values for `invalid_text`."""
    return -extremes[0], -extremes[1], -extremes[2], extremes[3]
