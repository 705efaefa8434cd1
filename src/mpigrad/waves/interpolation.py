"""Sources and receivers between cell centres: Kaiser-windowed sinc interpolation.

Hicks, "Arbitrary source and receiver positioning in finite-difference schemes using Kaiser windowed
sinc functions", Geophysics 67 (2002).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mpigrad._shapes import Float, Int
from mpigrad.waves.absorbing import WaveTile

__all__ = ["PointTable", "point_table"]

_HALF_WIDTH = 4
_SHAPE = 6.31  # of the Kaiser window: for at least four cells per wavelength (Hicks's table 1)


@dataclasses.dataclass(frozen=True, eq=False)
class PointTable:
    """This rank's cells around each of n points, in compressed rows.

    Point p takes weights[k] of cell cells[k] for k in starts[p] to starts[p + 1]; `cells` number
    this rank's wave tile in C order. All ranks' rows together have the whole of each point.
    """

    starts: Int[np.ndarray, " n1"]
    cells: Int[np.ndarray, " k"]
    weights: Float[np.ndarray, " k"]

    @property
    def points(self) -> Int[np.ndarray, " k"]:
        """The point that each cell and weight is for."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


def point_table(
    points: Float[np.ndarray, "n 2"],
    tile: WaveTile,
    what: str = "points",
    offset: tuple[float, float] = (0.0, 0.0),
) -> PointTable:
    """The cells and weights of points anywhere in the model.

    Along each axis the weight of a cell x cells away is sinc(x) w(x), with a Kaiser window w of
    half width 4. A point on a cell centre has that cell alone, with weight 1. Cells of absorbing
    layers take part; beyond them, or beyond a side without a layer, the field is zero.

    Parameters
    ----------
    points
        Coordinates in the unit of the grid's spacing.
    what
        What an error calls them.
    offset
        Where the values stand that are interpolated, in cells from the cell centres.

    Raises
    ------
    ValueError
        On all ranks, if a point lies outside the model.
    """
    grid = tile.grid
    size = np.array([n * h for n, h in zip(grid.shape, grid.spacing, strict=True)])
    outside = ((points < 0) | (points > size)).any(axis=1)
    if outside.any():
        first = int(np.argmax(outside))
        raise ValueError(
            f"waves: {int(outside.sum())} of {len(points)} {what} lie outside the model, number "
            f"{first} at {tuple(float(x) for x in points[first])}; the model reaches from (0, 0) "
            f"to {tuple(float(x) for x in size)}"
        )
    axes = [_along(points[:, axis], tile, axis, offset[axis]) for axis in range(2)]
    (i, wi), (j, wj) = axes
    weights = wi[:, :, None] * wj[:, None, :]
    cells = i[:, :, None] * tile.shape[1] + j[:, None, :]
    mine = weights != 0
    counts = mine.reshape(len(points), -1).sum(axis=1)
    return PointTable(np.concatenate([[0], np.cumsum(counts)]), cells[mine], weights[mine])


def _along(
    coordinates: np.ndarray, tile: WaveTile, axis: int, offset: float
) -> tuple[np.ndarray, np.ndarray]:
    """Cells (n, 8) of this rank's tile and their weights along an axis; weight 0 elsewhere."""
    place = coordinates / tile.grid.spacing[axis] - 0.5 - offset
    place = np.where(np.abs(place - np.rint(place)) < 1e-9, np.rint(place), place)
    first = np.floor(place).astype(int) - _HALF_WIDTH + 1
    cells = first[:, None] + np.arange(2 * _HALF_WIDTH)
    x = cells - place[:, None]
    window = np.i0(_SHAPE * np.sqrt(np.maximum(1 - (x / _HALF_WIDTH) ** 2, 0))) / np.i0(_SHAPE)
    # sinc of a whole number is rounded, not zero
    weights = np.where(x == np.rint(x), x == 0, np.sinc(x)) * window
    local = cells - tile.origin[axis]
    inside = (local >= 0) & (local < tile.shape[axis])
    return np.where(inside, local, 0), np.where(inside, weights, 0)
