"""Kaiser-windowed sinc interpolation of sources and receivers between cell centres.

Hicks, "Arbitrary source and receiver positioning in finite-difference schemes using Kaiser windowed
sinc functions", Geophysics 67 (2002).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mpigrad.runtime.shapes import Float, Int
from mpigrad.waves.absorbing import WaveTile

__all__ = ["PointTable", "point_table"]

_HALF_WIDTH = 4
_NODES = 6  # of the polynomial next to a surface
_SHAPE = 6.31  # of the Kaiser window, for at least four cells per wavelength (Hicks, table 1)


@dataclasses.dataclass(frozen=True, eq=False)
class PointTable:
    """This rank's cells around each of n points, in compressed rows.

    Point p is the sum of weights[k] times the value in cell cells[k] for k from starts[p] to
    starts[p + 1]. `cells` are indices into this rank's wave tile in C order. The sum over all ranks
    gives the value at the point.
    """

    starts: Int[np.ndarray, " n1"]
    cells: Int[np.ndarray, " k"]
    weights: Float[np.ndarray, " k"]

    @property
    def points(self) -> Int[np.ndarray, " k"]:
        """Index of the point of each cell and weight."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


def point_table(
    points: Float[np.ndarray, "n axes"],
    tile: WaveTile,
    what: str = "points",
    offset: Sequence[float] | None = None,
    surface: tuple[int, int] | None = None,
) -> PointTable:
    """Return the cells and weights of points anywhere in the model.

    Along each axis the weight of a cell x cells away is sinc(x) w(x), with a Kaiser window w of
    half width 4. A point on a cell centre uses that cell only, with weight 1. Cells of absorbing
    layers are used too. Beyond them, or beyond a side without a layer, the field is zero.

    Parameters
    ----------
    points
        Coordinates in the unit of the grid's spacing.
    what
        Name of the points in errors.
    offset
        Place of the interpolated values, in cells from the cell centres. Default: there.
    surface
        Axis and end (0 or 1) of a side that interpolation does not cross. Next to it, along this
        axis, it uses the polynomial through the six nearest values.

    Raises
    ------
    ValueError
        On all ranks, if a point lies outside the model, or lacks a coordinate for an axis.
    """
    grid = tile.grid
    if points.shape[1] != grid.ndim:
        raise ValueError(
            f"mpigrad.waves: the {what} have {points.shape[1]} coordinates, but the grid has "
            f"{grid.ndim} axes. Give {grid.ndim} coordinates for each of the {what}."
        )
    size = np.array([n * h for n, h in zip(grid.shape, grid.spacing, strict=True)])
    outside = ((points < 0) | (points > size)).any(axis=1)
    if outside.any():
        first = int(np.argmax(outside))
        raise ValueError(
            f"mpigrad.waves: {int(outside.sum())} of {len(points)} {what} lie outside the model, "
            f"the first has index {first} and is at {tuple(float(x) for x in points[first])}. The "
            f"model reaches from {(0,) * grid.ndim} to {tuple(float(x) for x in size)}. Move them "
            "into it."
        )
    weights, cells = np.ones((len(points), 1)), np.zeros((len(points), 1), int)
    for axis, shift in enumerate(offset or (0.0,) * grid.ndim):
        end = surface[1] if surface and surface[0] == axis else None
        index, weight = _along(points[:, axis], tile, axis, shift, end)
        weights = (weights[:, :, None] * weight[:, None, :]).reshape(len(points), -1)
        cells = (cells[:, :, None] * tile.shape[axis] + index[:, None, :]).reshape(len(points), -1)
    used = weights != 0
    counts = used.sum(axis=1)
    return PointTable(np.concatenate([[0], np.cumsum(counts)]), cells[used], weights[used])


def _along(
    coordinates: np.ndarray, tile: WaveTile, axis: int, offset: float, end: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return cells (n, 8) and their weights along an axis, 0 for cells outside this rank's tile."""
    place = coordinates / tile.grid.spacing[axis] - 0.5 - offset
    place = np.where(np.abs(place - np.rint(place)) < 1e-9, np.rint(place), place)
    first = np.floor(place).astype(int) - _HALF_WIDTH + 1
    cells = first[:, None] + np.arange(2 * _HALF_WIDTH)
    x = cells - place[:, None]
    window = np.i0(_SHAPE * np.sqrt(np.maximum(1 - (x / _HALF_WIDTH) ** 2, 0))) / np.i0(_SHAPE)
    # np.sinc of a whole number is not exactly zero
    weights = np.where(x == np.rint(x), x == 0, np.sinc(x)) * window
    if end is not None:
        edge = (0, tile.grid.shape[axis] - 1)[end]
        crosses = (cells[:, :1] < edge) if end == 0 else (cells[:, -1:] > edge)
        near = np.arange(2 * _HALF_WIDTH) + (edge if end == 0 else edge - 2 * _HALF_WIDTH + 1)
        cells = np.where(crosses, near, cells)
        exact = (place == np.rint(place))[:, None]
        polynomial = np.where(exact, cells == place[:, None], _polynomial(cells, place, edge, end))
        weights = np.where(crosses, polynomial, weights)
    local = cells - tile.origin[axis]
    inside = (local >= 0) & (local < tile.shape[axis])
    return np.where(inside, local, 0), np.where(inside, weights, 0)


def _polynomial(cells: np.ndarray, place: np.ndarray, edge: int, end: int) -> np.ndarray:
    """Return the weights of `cells` (n, 8) in the polynomial through the six nearest inside."""
    middle = np.floor(place).astype(int) - 2
    first = np.maximum(middle, edge) if end == 0 else np.minimum(middle, edge - _NODES + 1)
    weights = np.zeros(cells.shape)
    for k in range(_NODES):
        node = first + k
        others = [first + j for j in range(_NODES) if j != k]
        value = np.prod([(place - x) / (node - x) for x in others], axis=0)
        weights += np.where(cells == node[:, None], value[:, None], 0)
    return weights
