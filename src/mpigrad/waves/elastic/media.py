"""Effective media: the parameters of the cells, averaged to where the staggered fields lie."""

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
    """Parameters on a rank's wave tile; cell (i, j) has its centre at (i, j) here.

    `bulk` is lambda + mu and `shear` mu at the cells' centres, `corner_shear` mu at
    (i + 1/2, j + 1/2), where sigma_xy lies, `buoyancy_x` and `buoyancy_y` are 1/rho at
    (i + 1/2, j) and (i, j + 1/2), where v_x and v_y lie.
    """

    bulk: Tile
    shear: Tile
    corner_shear: Tile
    buoyancy_x: Tile
    buoyancy_y: Tile


def lame(
    vp: Float[ArrayLike, "*cells"], vs: Float[ArrayLike, "*cells"], rho: Float[ArrayLike, "*cells"]
) -> tuple[Float[ArrayLike, "*cells"], Float[ArrayLike, "*cells"]]:
    """Lame's parameters (lambda, mu), Pa, of velocities vp and vs, m/s, and a density, kg/m3."""
    mu = rho * vs**2
    return rho * vp**2 - 2 * mu, mu


def effective_media(
    lam: Float[Array, "lx ly"],
    mu: Float[Array, "lx ly"],
    rho: Float[Array, "lx ly"],
    tile: WaveTile,
) -> Media:
    """Staggered parameters on the wave tile, from this rank's tile of the model (collective).

    The model goes on with the values of its edge. The density between two cells is the mean of
    theirs; mu between four cells is their harmonic mean, which is 0 where one of them is a fluid
    (Moczo et al., "3D heterogeneous staggered-grid finite-difference modeling of seismic motion
    with volume harmonic and arithmetic averaging of elastic moduli and densities", BSSA 92, 2002).
    """
    padded = halo_exchange(jnp.stack([lam, mu, rho], axis=-1), tile.grid, width=1, boundary="edge")
    padded = jnp.pad(padded, (*tile.extension, (0, 0)), mode="edge")
    lam, mu, rho = (padded[1:, 1:, k] for k in range(3))  # one cell more on the far sides
    along_x = _in_series(mu[:-1], mu[1:])
    return Media(
        bulk=(lam + mu)[:-1, :-1],
        shear=mu[:-1, :-1],
        corner_shear=4 * _in_series(along_x[:, :-1], along_x[:, 1:]),
        buoyancy_x=2 / (rho[:-1, :-1] + rho[1:, :-1]),
        buoyancy_y=2 / (rho[:-1, :-1] + rho[:-1, 1:]),
    )


def _in_series(a: Array, b: Array) -> Array:
    """1 / (1/a + 1/b), and its derivatives, also where a or b is 0; if both are, they are 0."""
    total = a + b
    return a * b / jnp.where(total > 0, total, 1)
