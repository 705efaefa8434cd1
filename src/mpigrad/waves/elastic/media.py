"""Effective media: parameters of the cells, averaged to the points of the staggered fields."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike

from mpigrad._shapes import Array, Float
from mpigrad.grid.halo_exchange import halo_exchange
from mpigrad.waves.absorbing import WaveTile

__all__ = ["Media", "effective_media", "lame"]

Tile = Float[Array, "x y"]


class Media(NamedTuple):
    """Parameters on a rank's wave tile. The centre of cell (i, j) is at (i, j).

    Attributes
    ----------
    bulk, shear
        lambda + mu and mu at the cell centres.
    corner_shear
        mu at (i + 1/2, j + 1/2), the points of sigma_xy.
    buoyancy_x, buoyancy_y
        1/rho at (i + 1/2, j) and (i, j + 1/2), the points of v_x and v_y.
    """

    bulk: Tile
    shear: Tile
    corner_shear: Tile
    buoyancy_x: Tile
    buoyancy_y: Tile


def lame(
    vp: Float[ArrayLike, "*cells"], vs: Float[ArrayLike, "*cells"], rho: Float[ArrayLike, "*cells"]
) -> tuple[Float[ArrayLike, "*cells"], Float[ArrayLike, "*cells"]]:
    """Compute the Lame parameters of P and S velocities and a density.

    Differentiable. The results are rho vp^2 - 2 rho vs^2 and rho vs^2.

    Parameters
    ----------
    vp, vs
        Velocities in m/s, of any shape.
    rho
        Density in kg/m3.

    Returns
    -------
    tuple
        lambda and mu, in Pa.

    Examples
    --------
    >>> from mpigrad.waves import lame
    >>> lame(vp=3000.0, vs=1500.0, rho=2000.0)
    (9000000000.0, 4500000000.0)
    """
    mu = rho * vs**2
    return rho * vp**2 - 2 * mu, mu


def effective_media(
    lam: Float[Array, "lx ly"],
    mu: Float[Array, "lx ly"],
    rho: Float[Array, "lx ly"],
    tile: WaveTile,
) -> Media:
    """Compute staggered parameters on the wave tile from this rank's tile (collective).

    The model is continued with the values at its edge. The density between two cells is the mean of
    the two. mu between four cells is the harmonic mean of the four, which is 0 if one of them is
    fluid (Moczo et al., "3D heterogeneous staggered-grid finite-difference modeling of seismic
    motion with volume harmonic and arithmetic averaging of elastic moduli and densities", BSSA 92,
    2002).
    """
    padded = halo_exchange(jnp.stack([lam, mu, rho], axis=-1), tile.grid, width=1, boundary="edge")
    padded = jnp.pad(padded, (*tile.extension, (0, 0)), mode="edge")
    lam, mu, rho = (padded[1:, 1:, k] for k in range(3))  # one more cell on the far sides
    along_x = _in_series(mu[:-1], mu[1:])
    return Media(
        bulk=(lam + mu)[:-1, :-1],
        shear=mu[:-1, :-1],
        corner_shear=4 * _in_series(along_x[:, :-1], along_x[:, 1:]),
        buoyancy_x=2 / (rho[:-1, :-1] + rho[1:, :-1]),
        buoyancy_y=2 / (rho[:-1, :-1] + rho[:-1, 1:]),
    )


def _in_series(a: Array, b: Array) -> Array:
    """Return 1 / (1/a + 1/b), with its derivatives also for a = 0 or b = 0 (0 if both are 0)."""
    total = a + b
    return a * b / jnp.where(total > 0, total, 1)
