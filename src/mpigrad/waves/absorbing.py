"""Absorbing layers of waves: profiles, filters, tiles extended by layers, and their halos."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.extend import Float, exchange_with_neighbors
from mpigrad.grid import Grid

__all__ = [
    "Face",
    "Layer",
    "LayerFilter",
    "Side",
    "Surface",
    "WaveTile",
    "Widths",
    "damping",
    "exchange_faces",
    "largest_damping",
    "layer",
    "layer_filter",
    "surface_of",
    "widths_of",
    "without_layer",
]

# ---- Perfectly matched layers: widths, damping profiles, and tiles extended by layers ----


# Number of cells of the layers before and behind the model along each axis.
Widths = tuple[tuple[int, int], ...]


def widths_of(pml: Any, axes: int = 2) -> Widths:
    """Return the widths that an int, or ((x0, x1), (y0, y1)) with a pair per axis, stands for.

    Raises
    ------
    ValueError
        If `pml` has another form, or a width is negative.
    """
    if isinstance(pml, int | np.integer):
        pml = ((pml, pml),) * axes
    try:
        widths = tuple((operator.index(before), operator.index(behind)) for before, behind in pml)
        if len(widths) != axes:
            raise ValueError
    except (TypeError, ValueError):
        pairs = ", ".join(f"({axis}0, {axis}1)" for axis in "xyzuvw"[:axes])
        raise ValueError(
            f"pml: expected a number of cells or ({pairs}), got {pml!r}. Give one width "
            "for all sides, or a pair for each axis."
        ) from None
    if min(min(pair) for pair in widths) < 0:
        raise ValueError(f"pml: widths must not be negative, got {pml!r}. Use 0 for no layer.")
    return widths


# ---- A side without a layer: a free surface ----


Side = Literal["x0", "x1", "y0", "y1", "z0", "z1"]


class Surface(NamedTuple):
    """The first (end 0) or last (end 1) side of an axis."""

    axis: int
    end: int


def surface_of(side: Side | None, axes: int, name: str) -> Surface | None:
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
            f"{name}: free_surface must be one of {tuple(sides)} or None on {axes} axes, got "
            f"{side!r}."
        )
    return Surface(*divmod(sides.index(side), 2))


def without_layer(pml: object, surface: Surface | None, axes: int, name: str) -> Widths:
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
            f"{name}: the free surface is side {surface.end} of axis {surface.axis}, but pml "
            f"gives it a layer of {widths[surface.axis][surface.end]} cells. Make it 0."
        )
    return widths


# ---- Tiles extended by layers, and the exchange of their faces ----


class Face(NamedTuple):
    """A face shared with the tile of `rank`: along `axis`, before (step -1) or behind (1) it."""

    axis: int
    step: int
    rank: int


@dataclasses.dataclass(frozen=True)
class WaveTile:
    """This rank's tile of a model with the absorbing layers next to it.

    The layers belong to the tiles at the boundary of the grid, so extending a model sends no
    messages. Cells have the same indices as in the grid, and negative ones in the layers before it.

    Parameters
    ----------
    grid
        A grid with two or three axes that is not periodic.
    pml
        Number of cells of the absorbing layers: one for all sides, or ((x0, x1), (y0, y1)), with
        one more pair (z0, z1) on three axes.

    Raises
    ------
    ValueError
        If the grid is periodic, or `pml` is not valid.

    Examples
    --------
    >>> from mpigrad.grid import Grid
    >>> from mpigrad.waves import WaveTile
    >>> tile = WaveTile(Grid((60, 40), (10.0, 10.0)), pml=((20, 20), (0, 20)))
    >>> tile.shape, tile.origin
    ((100, 60), (-20, 0))
    >>> tile.interior
    (slice(20, 80, None), slice(0, 40, None))
    """

    grid: Grid
    pml: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "pml", widths_of(self.pml, self.grid.ndim))
        if any(self.grid.periodic):
            raise ValueError(
                f"mpigrad.waves: the grid has periodic={self.grid.periodic}, but absorbing layers "
                "lie at its sides. Make the grid with periodic=False."
            )

    @functools.cached_property
    def extension(self) -> Widths:
        """Widths of the layers on this rank's tile: a pair for each axis."""
        return tuple(
            (before if place == 0 else 0, behind if place == tiles - 1 else 0)
            for (before, behind), place, tiles in zip(
                self.pml, self.grid.coords, self.grid.dims, strict=True
            )
        )

    @functools.cached_property
    def origin(self) -> tuple[int, ...]:
        """Index of the first cell along each axis."""
        parts = zip(self.grid.slices, self.extension, strict=True)
        return tuple(part.start - before for part, (before, _) in parts)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Number of cells along each axis."""
        return tuple(
            before + n + behind
            for n, (before, behind) in zip(self.grid.local_shape, self.extension, strict=True)
        )

    @functools.cached_property
    def faces(self) -> tuple[Face, ...]:
        """Neighbouring tiles across faces: x before and behind, then y, then z."""
        faces = []
        for neighbor in self.grid.neighbors:
            axes = [axis for axis, step in enumerate(neighbor.step) if step]
            if len(axes) == 1:
                faces.append(Face(axes[0], neighbor.step[axes[0]], neighbor.rank))
        return tuple(sorted(faces))

    @property
    def interior(self) -> tuple[slice, ...]:
        """Slices of the model's own tile in this tile."""
        return tuple(
            slice(before, before + n)
            for n, (before, _) in zip(self.grid.local_shape, self.extension, strict=True)
        )

    def check(self, reach: int, axes: tuple[int, ...] = (2,)) -> None:
        """Raise an error unless the stencil reaches no further than the neighbouring tiles.

        Parameters
        ----------
        reach
            Number of cells that the stencil reaches.
        axes
            The numbers of axes that the waves can have.

        Raises
        ------
        ValueError
            On all ranks: if the grid has another number of axes, or a tile has fewer than `reach`
            cells along a divided axis.
        """
        if self.grid.ndim not in axes:
            counts = " or ".join(map(str, axes))
            raise ValueError(
                f"mpigrad.waves: expected a grid with {counts} axes, got {self.grid.ndim}. Make a "
                f"grid with {counts} axes."
            )
        for axis, (tiles, cells) in enumerate(
            zip(self.grid.dims, self.grid.smallest_tile, strict=True)
        ):
            if tiles > 1 and cells < reach:
                raise ValueError(
                    f"mpigrad.waves: with {self.grid.shape[axis]} cells along axis {axis} in "
                    f"{tiles} tiles the smallest tile has {cells}, but the stencil reaches {reach} "
                    "cells into the next tile. Use fewer ranks, other dims, or more cells."
                )


def damping(
    tile: WaveTile, axis: int, velocity: float, reflection: float, offset: float = 0.0
) -> Float[np.ndarray, " n"]:
    """Return the damping of this rank's cells along an axis, in 1/s.

    sigma(d) = 3 v ln(1/R) / (2 L) (d / L)^2 at the depth d in a layer of thickness L, so that a
    wave of velocity v, at normal incidence, returns with R of its amplitude (Collino and Tsogka
    2001, with a quadratic profile). The layer begins at the face of its first cell.

    Parameters
    ----------
    offset
        Place of the values in a cell, in cells from its centre.
    """
    h = tile.grid.spacing[axis]
    before, behind = tile.pml[axis]
    place = np.arange(tile.shape[axis]) + tile.origin[axis] + 0.5 + offset
    sigma = np.zeros(tile.shape[axis])
    for width, depth in ((before, -place), (behind, place - tile.grid.shape[axis])):
        if width:
            top = largest_damping(width * h, velocity, reflection)
            sigma += top * (np.maximum(depth, 0) / width) ** 2
    return sigma


def largest_damping(thickness: float, velocity: float, reflection: float) -> float:
    """Return the damping at the outer side of a layer, in 1/s, see `damping`."""
    return 3 * velocity * math.log(1 / reflection) / (2 * thickness)


# ---- The filters of convolutional absorbing layers, which acoustic waves on three axes have ----
#
# Layers along x stretch the axis by s = 1 + sigma / (i omega + alpha) (Kuzuoglu and Mittra 1996):
# the derivative along it becomes (1/s) d/dx. Here 1/s is a filter in time, by the bilinear
# transform: with q = (sigma + alpha) dt/2, and the shift Z of one step,
#
#     1/s = k + e / (Z - b)    k = (1 + alpha dt/2) / (1 + q)    b = (1 - q) / (1 + q)
#                              e = -sigma dt / (1 + q)^2
#
# so it has one memory m, with m_next = b m + e f, and makes k f + m of f.


# alpha, as a fraction of the largest damping along the axis. With alpha = 0 a constant pressure in
# a corner would have no force that moves it back.
SHIFT = 0.05


class LayerFilter(NamedTuple):
    """Factors of the filter 1/s along an axis, each in this rank's cells along it.

    Attributes
    ----------
    k, b, e
        At the cell centres: of what passes, of the memory, and of what enters the memory.
    k_half, b_half, e_half
        The same at the faces behind the cells.
    """

    k: Float[np.ndarray, " n"]
    b: Float[np.ndarray, " n"]
    e: Float[np.ndarray, " n"]
    k_half: Float[np.ndarray, " n"]
    b_half: Float[np.ndarray, " n"]
    e_half: Float[np.ndarray, " n"]

    def between(self, cells: int) -> Float[np.ndarray, " n"]:
        """Return k halfway to the cells that lie `cells` further on (back, if negative)."""
        places = np.arange(len(self.k)) + min(cells, 0) + abs(cells) // 2
        return np.take(self.k_half if cells % 2 else self.k, places, mode="clip")


def layer_filter(
    tile: WaveTile, axis: int, dt: float, velocity: float, reflection: float
) -> LayerFilter:
    """Return the filter along an axis, which is 1 outside of the layers.

    Parameters
    ----------
    velocity, reflection
        As for `damping`.
    """
    h = tile.grid.spacing[axis]
    widths = [width for width in tile.pml[axis] if width]
    alpha = SHIFT * max((largest_damping(w * h, velocity, reflection) for w in widths), default=0)
    factors = []
    for offset in (0.0, 0.5):
        sigma = damping(tile, axis, velocity, reflection, offset)
        q = (sigma + alpha) * (dt / 2)
        inside = sigma > 0
        factors += [
            np.where(inside, (1 + alpha * dt / 2) / (1 + q), 1),
            np.where(inside, (1 - q) / (1 + q), 0),
            np.where(inside, -sigma * dt / (1 + q) ** 2, 0),
        ]
    return LayerFilter(*factors)


# ---- The coefficients of convolutional perfectly matched layers (C-PML) on a rank's wave tile


POWER = 2  # of the damping's growth with depth


@dataclasses.dataclass(frozen=True)
class Layer:
    """Coefficients of a derivative along one axis in the layers on both sides of a wave tile.

    A derivative g is replaced by g + psi in the first `before` and the last `after` cells along the
    axis. The memory psi is updated in each step: psi <- b psi + a g. The rows of `a` and `b` hold
    the values at the cell centres and at the half points. Their columns are these cells, first
    those of the first side.
    """

    before: int
    after: int
    a: Float[np.ndarray, "2 cells"]
    b: Float[np.ndarray, "2 cells"]


def layer(
    before: int,
    after: int,
    spacing: float,
    dt: float,
    velocity: float,
    frequency: float,
    reflection: float,
    stagger: int = 1,
) -> Layer:
    """Return the layers of `before` and `after` cells on the two sides of a wave tile.

    A width of 0 means no layer. At depth x in a layer of thickness L: d = d0 (x/L)^2 with
    d0 = -3 velocity ln(reflection) / 2L,
    alpha = pi frequency (1 - x/L), kappa = 1, b = exp(-(d + alpha) dt), a = d (b - 1) / (d + alpha)
    (Komatitsch and Martin, "An unsplit convolutional perfectly matched layer improved at grazing
    incidence for the seismic wave equation", Geophysics 72, 2007).

    Parameters
    ----------
    spacing
        Size of a cell along the axis, in m.
    velocity
        Velocity of the fastest wave, in m/s.
    frequency
        Frequency of the source, in Hz.
    reflection
        Theoretical reflection of a wave that enters at a right angle.
    stagger
        1 if the half points lie further than the cell centres, -1 if they lie before them.
    """

    def side(cells: int, outwards: int) -> tuple[np.ndarray, np.ndarray]:
        # Depth of the cell centres and of the half points, over the thickness.
        centers = np.arange(cells) + 0.5
        halves = centers + 0.5 * outwards * stagger
        depth = np.maximum(np.stack([centers, halves])[:, ::outwards], 0) / max(cells, 1)
        strongest = -(POWER + 1) * velocity * math.log(reflection) / (2 * max(cells, 1) * spacing)
        d, alpha = strongest * depth**POWER, math.pi * frequency * (1 - depth)
        b = np.exp(-(d + alpha) * dt)
        return np.where(depth > 0, d * (b - 1) / np.where(depth > 0, d + alpha, 1), 0.0), b

    sides = [side(before, -1), side(after, 1)]
    a, b = (np.concatenate([part[k] for part in sides], axis=1) for k in range(2))
    return Layer(before, after, a, b)


# ---- Halo exchange of star stencils across faces, for the XLA forms of waves ----
#
# `grid.halo_exchange` cannot do this at the same cost. It pads all axes of every field and sends
# the corners to diagonal neighbours, while a star stencil needs each field padded along one axis
# only. Two calls of it, one for each axis, would make two rounds of messages instead of one. It
# also needs fields of the grid's tile with the tile's axes first, while waves have fields with
# the shots first, on tiles that are extended by absorbing layers: moving the axes would copy all
# fields in each step.


def exchange_faces(
    tile: WaveTile, width: int, *along: Sequence[jax.Array]
) -> tuple[list[jax.Array], ...]:
    """Pad fields along one axis with `width` layers of cells from the neighbouring tiles.

    One packed message goes to each neighbour across a face. Cells beyond the absorbing layers are
    zero.

    Parameters
    ----------
    along
        For each axis, the fields to be padded along it. They have the shape (..., nx, ny) or
        (..., nx, ny, nz), and the same dtype.

    Returns
    -------
    tuple
        For each axis its fields, longer by 2 width cells along this axis.
    """
    axes = tile.grid.ndim
    fields = [list(group) for group in along]
    halos: dict[tuple[int, int], list[jax.Array]] = {}
    if tile.faces:
        layers = [
            [
                jax.lax.slice_in_dim(
                    f,
                    0 if face.step < 0 else f.shape[face.axis - axes] - width,
                    width if face.step < 0 else None,
                    axis=face.axis - axes + f.ndim,
                )
                for f in fields[face.axis]
            ]
            for face in tile.faces
        ]
        counts = [sum(layer.size for layer in group) for group in layers]
        received = exchange_with_neighbors(
            f"halo_exchange(width={width})",
            jnp.concatenate([layer.ravel() for group in layers for layer in group]),
            neighbors=[face.rank for face in tile.faces],
            sendcounts=counts,
            recvcounts=counts,
            comm=tile.grid.comm,
        )
        start = 0
        for face, group in zip(tile.faces, layers, strict=True):
            pieces = []
            for layer in group:
                pieces.append(received[start : start + layer.size].reshape(layer.shape))
                start += layer.size
            halos[face.axis, face.step] = pieces

    def pad(axis: int) -> list[jax.Array]:
        results = []
        for i, f in enumerate(fields[axis]):
            shape = list(f.shape)
            shape[axis - axes] = width
            before, behind = (
                halos[axis, step][i] if (axis, step) in halos else jnp.zeros(shape, f.dtype)
                for step in (-1, 1)
            )
            results.append(jnp.concatenate([before, f, behind], axis=axis - axes))
        return results

    return tuple(pad(axis) for axis in range(axes))
