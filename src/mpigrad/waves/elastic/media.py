"""Effective media: parameters of the cells, averaged to the points of the staggered fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mpigrad._shapes import Array, Float
from mpigrad.grid.halo_exchange import halo_exchange
from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.elastic.free_surface import Surface, stagger_of, without_traction
from mpigrad.waves.elastic.state import axis_pairs

__all__ = ["Media", "effective_media", "lame", "native_models"]

Tile = Float[Array, "*cells"]


class Media(NamedTuple):
    """Parameters on a rank's wave tile. The centre of cell (i, j) is at (i, j).

    Half points lie before the cell centres along an axis whose first side is a free surface.

    Attributes
    ----------
    bulk, shear
        lambda + mu and mu at the cell centres.
    shears
        mu at the points of sigma_xy, sigma_xz and sigma_yz, such as (i + 1/2, j + 1/2).
    buoyancies
        1/rho at the points of v_x, v_y and v_z, such as (i + 1/2, j).
    """

    bulk: Tile
    shear: Tile
    shears: tuple[Tile, ...]
    buoyancies: tuple[Tile, ...]


def native_models(media: Media) -> list[jax.Array]:
    """Return the arrays of the native kernels: on three axes lambda + 2/3 mu is the first one."""
    if media.bulk.ndim == 3:
        media = media._replace(bulk=media.bulk - media.shear / 3)
    return jax.tree.leaves(media)


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
    lam: Float[Array, "*tile"],
    mu: Float[Array, "*tile"],
    rho: Float[Array, "*tile"],
    tile: WaveTile,
    surface: Surface | None = None,
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
    lam, mu, rho = (padded[..., k] for k in range(3))

    def shifted(field: Array, shifts: Mapping[int, int]) -> Array:
        """Return the values `shifts[axis]` cells towards the half points along some axes."""
        starts = [1 + stagger_of(surface, a) * shifts.get(a, 0) for a in range(tile.grid.ndim)]
        return field[tuple(slice(k, k + n) for k, n in zip(starts, tile.shape, strict=True))]

    def corner(a: int, b: int) -> Array:
        along = [_in_series(shifted(mu, {b: k}), shifted(mu, {a: 1, b: k})) for k in (0, 1)]
        return 4 * _in_series(*along)

    n = tile.grid.ndim
    shears = tuple(corner(a, b) for a, b in axis_pairs(n))
    return Media(
        bulk=shifted(lam + mu, {}),
        shear=shifted(mu, {}),
        shears=shears if surface is None else without_traction(shears, surface, tile),
        buoyancies=tuple(2 / (shifted(rho, {}) + shifted(rho, {a: 1})) for a in range(n)),
    )


def _in_series(a: Array, b: Array) -> Array:
    """Return 1 / (1/a + 1/b), with its derivatives also for a = 0 or b = 0 (0 if both are 0)."""
    total = a + b
    return a * b / jnp.where(total > 0, total, 1)
