"""A side of an elastic model without traction, by summation by parts.

The surface is the side of the grid. Points that lie half a cell from the cell centres along its
axis, of the normal velocity and of two shear stresses, lie on it. Next to the surface the
differences are one-sided, second order, and those of O'Reilly et al. ("Energy stable and
high-order-accurate finite difference methods on staggered grids", J. Comput. Phys. 346, 2017). With
the weights W of the points, the difference to half points is -(W D)^T of the difference D to cell
centres. So the traction of the surface vanishes in the equations of motion, energy is conserved,
and the positions of a source and a receiver can be exchanged.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpigrad._shapes import Array, Float
from mpigrad.waves.absorbing import WaveTile, Widths, widths_of
from mpigrad.waves.elastic.state import axis_pairs

__all__ = [
    "CELLS",
    "Side",
    "Surface",
    "is_at",
    "near_differences",
    "source_factors",
    "stagger_of",
    "surface_of",
    "without_layer",
    "without_traction",
]

Side = Literal["x0", "x1", "y0", "y1", "z0", "z1"]

CELLS = 6  # that a tile next to the surface needs, for differences and interpolation

# Rows of differences, from the surface inwards: to centres from the half points 0, 1, ..., and to
# half points from the centres 1/2, 3/2, ...
_TO_CENTERS = np.array([
    [-79 / 78, 27 / 26, -1 / 26, 1 / 78, 0],
    [2 / 21, -9 / 7, 9 / 7, -2 / 21, 0],
    [1 / 75, 0, -27 / 25, 83 / 75, -1 / 25],
])  # fmt: skip
_TO_HALVES = np.array([
    [79 / 28, -3 / 14, -1 / 28, 0, 0],
    [-1, 1, 0, 0, 0],
    [1 / 24, -9 / 8, 9 / 8, -1 / 24, 0],
    [-1 / 71, 6 / 71, -83 / 71, 81 / 71, -3 / 71],
])  # fmt: skip
_CENTER_WEIGHTS = (13 / 12, 7 / 8, 25 / 24)
_HALF_WEIGHTS = (7 / 18, 9 / 8, 1, 71 / 72)


class Surface(NamedTuple):
    """The first (end 0) or last (end 1) side of an axis."""

    axis: int
    end: int


def surface_of(side: Side | None, axes: int) -> Surface | None:
    """Return the surface of a name such as "z0", the side before the first cell along z.

    Raises
    ------
    ValueError
        If there is not such a side.
    """
    if side is None:
        return None
    sides = [f"{axis}{end}" for axis in "xyz"[:axes] for end in (0, 1)]
    if side not in sides:
        raise ValueError(
            f"Elastic: free_surface must be one of {tuple(sides)} or None on {axes} axes, got "
            f"{side!r}."
        )
    return Surface(*divmod(sides.index(side), 2))


def without_layer(pml: object, surface: Surface | None, axes: int) -> Widths:
    """Return the widths of the layers. One number for all sides leaves the surface out.

    Raises
    ------
    ValueError
        If the surface has a layer of its own.
    """
    widths = widths_of(pml, axes)
    if surface is None:
        return widths
    if isinstance(pml, int | np.integer):
        pairs = [list(pair) for pair in widths]
        pairs[surface.axis][surface.end] = 0
        return tuple((before, behind) for before, behind in pairs)
    if widths[surface.axis][surface.end]:
        raise ValueError(
            f"Elastic: the free surface is side {surface.end} of axis {surface.axis}, but pml "
            f"gives it a layer of {widths[surface.axis][surface.end]} cells. Make it 0."
        )
    return widths


def is_at(surface: Surface | None, tile: WaveTile) -> bool:
    """Return whether this rank's tile lies at the surface."""
    if surface is None:
        return False
    coordinate, tiles = tile.grid.coords[surface.axis], tile.grid.dims[surface.axis]
    return coordinate == (0, tiles - 1)[surface.end]


def stagger_of(surface: Surface | None, axis: int) -> int:
    """Return 1 if the half points of an axis lie behind the cell centres, -1 if before them.

    So that half points lie on the surface, they lie before the centres if it is the first side.
    """
    return -1 if surface == (axis, 0) else 1


def near_differences(
    field: Float[Array, ...], g: Float[Array, ...], surface: Surface, spacing: float, half: bool
) -> Float[Array, ...]:
    """Return differences g of a field with the shots first, with those next to the surface.

    Parameters
    ----------
    half
        True for differences at half points, of a field at the cell centres.
    """
    axis = surface.axis + 1 - g.ndim
    table = _TO_HALVES if half else _TO_CENTERS
    rows, reach = table.shape
    table = table / spacing
    if surface.end == 1:  # mirrored
        table = -table[::-1, ::-1]
    cells = g.shape[axis]
    near = lax.slice_in_dim(field, *_ends(surface, reach, cells), axis=axis + g.ndim)
    rest = lax.slice_in_dim(
        g, *((rows, cells) if surface.end == 0 else (0, cells - rows)), axis=axis + g.ndim
    )
    first = jnp.moveaxis(
        jnp.tensordot(jnp.asarray(table, g.dtype), near, ((1,), (axis + g.ndim,))), 0, axis
    )
    return jnp.concatenate([first, rest] if surface.end == 0 else [rest, first], axis)


def without_traction(
    shears: tuple[Float[Array, "*cells"], ...], surface: Surface, tile: WaveTile
) -> tuple[Float[Array, "*cells"], ...]:
    """Return the shear moduli with zeros on the surface, so that its shear stress stays zero."""
    if not is_at(surface, tile):
        return shears
    row = 0 if surface.end == 0 else -1
    index = (*(slice(None),) * surface.axis, row)
    pairs = axis_pairs(tile.grid.ndim)
    return tuple(
        mu.at[index].set(0) if surface.axis in pair else mu
        for pair, mu in zip(pairs, shears, strict=True)
    )


def source_factors(
    surface: Surface | None, tile: WaveTile, half: bool
) -> Float[np.ndarray, "*ones"]:
    """Return 1 / weight of the points next to the surface, which sources are multiplied by."""
    axes = tile.grid.ndim
    if surface is None or not is_at(surface, tile):
        return np.ones((1,) * axes)
    weights = np.ones(tile.shape[surface.axis])
    near = _HALF_WEIGHTS if half else _CENTER_WEIGHTS
    weights[: len(near)] = near
    if surface.end == 1:
        weights = weights[::-1]
    return (1 / weights).reshape([-1 if axis == surface.axis else 1 for axis in range(axes)])


def _ends(surface: Surface, reach: int, cells: int) -> tuple[int, int]:
    return (0, reach) if surface.end == 0 else (cells - reach, cells)
