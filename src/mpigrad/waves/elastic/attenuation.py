"""Loss of elastic waves by standard linear solids.

The stress of a modulus M is that of the unrelaxed modulus M_U (of infinite frequency) less the part
that has relaxed: with the sum B of the weights b_l of the mechanisms and the strain rates e,

    rate of stress = M_U e - (M_U - M_R) / B times the sum of b_l r_l,    t_l r_l' + r_l = e

with the relaxed (static) modulus M_R. The memories r_l are strain rates, so they are the same
for both moduli, and do not depend on the model. In a step r_l is the mean of its values before and
after it (the trapezoidal rule), which never adds energy and leaves the largest stable step of the
unrelaxed moduli as it is. As Robertsson, Blanch and Symes ("Viscoelastic finite-difference
modeling", Geophysics 59, 1994) and Bohlen ("Parallel 3-D viscoelastic finite difference seismic
modelling", Computers & Geosciences 28, 2002), with memories of strain instead of stress.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad._shapes import Array, Float
from mpigrad.waves.elastic.media import Media, Tile
from mpigrad.waves.relaxation import Relaxation

__all__ = ["Lame", "Loss", "loss_of", "low_q_text", "moduli", "relax", "smallest"]


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
        relaxed = modulus * relaxation.relaxed_square(q, frequency)
        return relaxed * (1 + relaxation.strength(q) * sum(relaxation.weights)), relaxed

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
    ones = (1,) * (memory.ndim - 2)
    times, weights = (
        np.asarray(x).reshape(-1, *ones) for x in (relaxation.times, relaxation.weights)
    )
    a = dt / (2 * times)
    keep, gain = (jnp.asarray(x, memory.dtype) for x in ((1 - a) / (1 + a), 2 * a / (1 + a)))
    following = keep * memory + gain * strain
    mean = jnp.sum(jnp.asarray(weights / 2, memory.dtype) * (memory + following), axis=1)
    return [mean[:, k] for k in range(len(rates))], following


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
