"""The buoyancies 1/rho of acoustic waves with a variable density, for the JAX programs.

The second derivative along an axis, with the coefficients c_n of `SECOND_DERIVATIVES`, becomes

    rho[j] sum over n of c_n (b_n[j] (w[j+n] - w[j]) - b_n[j-n] (w[j] - w[j-n])) / h^2

with the buoyancy b_n[j] between the cells j and j + n. Its inverse is the mean of the densities of
these two cells. This has the order of accuracy of the differences for smooth densities, because
both factors of a difference have expansions in even powers of n h around its middle.

A heavy cell between light ones would make the operator indefinite, because c_2 is negative: waves
would grow with any time step. So the inverse of b_n is at least 2/3 of the mean density along the
path from j to j + n (the integral between these cells by the trapezoidal rule). Then, by the
inequality of Cauchy and Schwarz, the terms with negative c_n are smaller than the term with c_1.

On two axes a layer along x adds the derivative of beta psi along y, and psi is the integral in time
of a multiple of w_y. Its waves do not grow if the squares of w_y, with the weight beta, have a sum
that is not larger than the energy of the fluxes above. With beta = 1/rho this is not so where the
density changes from cell to cell, because the derivatives of psi are wider. So

    1/beta[j] = rho[j] + sum over 0 < |k| <= reach of (rho[j+k] - rho[j])^2 / (2 rho[j])

which differs from rho by a term of second order for smooth densities. With half of this term the
condition held in all tested densities along a line, with ratios up to 1000 between cells.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpigrad._shapes import Array, Float
from mpigrad.grid.grid import Grid
from mpigrad.grid.halo_exchange import halo_exchange
from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.acoustic.differences import shifted
from mpigrad.waves.stability import SECOND_DERIVATIVES, wave_equation_limit

__all__ = ["Buoyancy", "buoyancy_of", "divergence", "limiting_square"]

# The mean density along a path, over the smallest density that its difference has. Below 1.93 the
# operator is definite at all orders. From a ratio of 2 between a cell and its neighbours the two
# means differ by this.
PATH = 1.5


class Buoyancy(NamedTuple):
    """Densities and buoyancies on this rank's tile with its layers.

    Attributes
    ----------
    density
        rho in the cells.
    cells
        1/rho in the cells.
    wide
        For each axis beta in the cells, which multiplies the memories of layers on two axes.
    between
        For each axis, and for n = 1, 2, ... up to the stencil's reach, the buoyancy between the
        cells j - n and j. It has n more cells than the tile along the axis.
    """

    density: Float[Array, "*cells"]
    cells: Float[Array, "*cells"]
    wide: Any
    between: Any


def buoyancy_of(tile: WaveTile, order: int, density: Float[Array, "*tile"]) -> Buoyancy:
    """Return the buoyancies of a density (collective).

    Densities of the neighbouring tiles come by one message to each of them. Layers, and what is
    beyond them, have the density of the nearest cell.

    Parameters
    ----------
    density
        This rank's tile of the model.
    """
    axes, reach = tile.grid.ndim, order // 2
    halos = halo_exchange(density, tile.grid, width=reach, boundary="edge")
    padded = jnp.pad(halos, tile.extension, mode="edge")
    between, wide = [], []
    for axis in range(axes):
        line = padded
        for other in set(range(axes)) - {axis}:
            line = _cells(line, other, reach, tile.shape[other])
        between.append(
            tuple(_between(line, axis, reach, tile.shape[axis], n) for n in range(1, reach + 1))
        )
        wide.append(_wide(line, axis, reach, tile.shape[axis]))
    inner = padded
    for axis in range(axes):
        inner = _cells(inner, axis, reach, tile.shape[axis])
    return Buoyancy(inner, 1 / inner, tuple(wide), tuple(between))


def divergence(
    w: Float[Array, "*padded"],
    buoyancy: Buoyancy,
    axis: int,
    h: float,
    order: int,
    factors: Any = None,
) -> Float[Array, "*shots_and_cells"]:
    """Return the derivative of b times the derivative, both along an axis.

    Parameters
    ----------
    w
        The fields of all shots, padded along the axis.
    factors
        Functions of the layers: factors(n) is what multiplies the buoyancy halfway to the cells
        that lie n further on. Default: 1.
    """
    reach, cells = order // 2, buoyancy.density.shape[axis]
    total: Any = 0.0  # of no dtype of its own
    for n, (c, b) in enumerate(
        zip(SECOND_DERIVATIVES[order][1:], buoyancy.between[axis], strict=True), 1
    ):
        ahead, behind = _cells(b, axis, n, cells), _cells(b, axis, 0, cells)
        if factors is not None:
            ahead, behind = factors(n) * ahead, factors(-n) * behind
        here = shifted(w, axis, reach, 0)
        rise = ahead * (shifted(w, axis, reach, n) - here)
        total = total + c / h**2 * (rise - behind * (here - shifted(w, axis, reach, -n)))
    return total


def limiting_square(
    grid: Grid, order: int, velocity: Float[Array, "*n"], buoyancy: Buoyancy
) -> Float[Array, ""]:
    """Return the square of the velocity that limits the time step, largest on this rank's tile.

    The eigenvalues of the operator are at most twice the sums of its rows over the positive
    coefficients, which belong to odd n. With a constant density this is the square of the
    velocity.

    Parameters
    ----------
    velocity
        In the cells of the tile with its layers.
    """
    total: Any = 0.0  # of no dtype of its own
    for axis, h in enumerate(grid.spacing):
        cells = velocity.shape[axis]
        for n, (c, b) in enumerate(
            zip(SECOND_DERIVATIVES[order][1:], buoyancy.between[axis], strict=True), 1
        ):
            if c > 0:
                both = _cells(b, axis, n, cells) + _cells(b, axis, 0, cells)
                total = total + 2 * c / h**2 * both
    square = (wave_equation_limit(grid, order) / 2) ** 2
    return jnp.max(velocity**2 * buoyancy.density * total) * square


def _between(line: jax.Array, axis: int, reach: int, cells: int, n: int) -> jax.Array:
    """Return the buoyancy between the cells j - n and j, for j = 0 to cells + n - 1."""
    path = [_cells(line, axis, reach - n + m, cells + n) for m in range(n + 1)]
    ends = (path[0] + path[-1]) / 2
    if n > 1:
        ends = jnp.maximum(ends, (ends + sum(path[1:-1])) / (n * PATH))
    return 1 / ends


def _wide(line: jax.Array, axis: int, reach: int, cells: int) -> jax.Array:
    here = _cells(line, axis, reach, cells)
    others = [_cells(line, axis, k, cells) for k in range(2 * reach + 1) if k != reach]
    squares = sum((other - here) ** 2 for other in others)
    return 1 / (here + squares / (2 * here))


def _cells(f: jax.Array, axis: int, start: int, cells: int) -> jax.Array:
    return jax.lax.slice_in_dim(f, start, start + cells, axis=axis)
