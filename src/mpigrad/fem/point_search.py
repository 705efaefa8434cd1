"""Find the cells that contain points."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpigrad.fem.reference import ReferenceCell, reference_cell
from mpigrad.fem.space_filling_curve import morton_keys

__all__ = ["FoundPoints", "find_points", "reference_coordinates"]

# A point may lie outside of a cell by this, in coordinates of the reference cell.
_TOLERANCE = 1e-8
_NEWTON_STEPS = 25


@dataclass(frozen=True)
class FoundPoints:
    """The cell of each point.

    Attributes
    ----------
    cells
        The cell, or -1, shape (m,).
    coordinates
        Coordinates in the reference cell, shape (m, dim).
    distances
        How far the point lies outside of the cell, in coordinates of the reference cell: 0 inside,
        infinite for points without a cell, shape (m,).
    """

    cells: NDArray[np.int64]
    coordinates: NDArray[np.float64]
    distances: NDArray[np.float64]


def find_points(
    points: NDArray[np.float64],
    cells: NDArray[np.int32],
    cell_type: str,
    cell_ids: NDArray[np.int64],
    places: NDArray[np.float64],
) -> FoundPoints:
    """Find the cell of each place among the cells of this rank.

    Parameters
    ----------
    points, cells, cell_type, cell_ids
        The mesh of this rank.
    places
        Coordinates of the places, shape (m, dim).
    """
    cell = reference_cell(cell_type)
    m, dim = places.shape
    found = np.full(m, -1, np.int64)
    distances = np.full(m, np.inf)
    coordinates = np.zeros((m, dim))
    place, candidate = _candidates(points, cells, places)
    if len(place):
        x = reference_coordinates(cell, points[cells[candidate]], places[place])
        outside = _distance(cell, x)
        near = outside <= _TOLERANCE
        place, candidate, x = place[near], candidate[near], x[near]
        outside = np.where(outside[near] <= 1e-12, 0.0, outside[near])
        # The best candidate of each place comes first.
        order = np.lexsort([cell_ids[candidate], outside, place])
        place, first = np.unique(place[order], return_index=True)
        chosen = order[first]
        found[place] = candidate[chosen]
        distances[place] = outside[chosen]
        coordinates[place] = x[chosen]
    return FoundPoints(found, coordinates, distances)


def _candidates(
    points: NDArray[np.float64], cells: NDArray[np.int32], places: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all pairs of a place and a cell whose box around it contains the place.

    The boxes are the leaves of a binary tree over the cells, in the order of a space-filling curve.
    All places go down the tree together.
    """
    if not len(cells) or not len(places):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    corners = points[cells]
    low, high = corners.min(axis=1), corners.max(axis=1)
    margin = 1e-6 * (high - low).max(axis=1, keepdims=True)
    order = np.argsort(morton_keys(0.5 * (low + high)), kind="stable")
    levels = [((low - margin)[order], (high + margin)[order])]
    while len(levels[-1][0]) > 1:
        below = levels[-1]
        starts = np.arange(0, len(below[0]), 2)
        levels.append(
            (np.minimum.reduceat(below[0], starts), np.maximum.reduceat(below[1], starts))
        )
    place = np.arange(len(places))
    box = np.zeros(len(places), np.int64)
    for depth, (lower, upper) in enumerate(reversed(levels)):
        if depth:
            place = np.repeat(place, 2)
            box = (2 * box[:, None] + np.arange(2)).reshape(-1)
            place, box = place[box < len(lower)], box[box < len(lower)]
        x = places[place]
        inside = ((lower[box] <= x) & (x <= upper[box])).all(axis=1)
        place, box = place[inside], box[inside]
    return place, order[box]


def reference_coordinates(
    cell: ReferenceCell, corners: NDArray[np.float64], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the coordinates of points in the reference cell, by Newton's method.

    Parameters
    ----------
    cell
        The reference cell.
    corners
        The corners of the cell of each point, shape (n, n_corners, dim).
    x
        The points, shape (n, dim).
    """
    xi = np.full_like(x, 0.5 if not cell.is_simplex else 1 / (cell.dim + 1))
    active = np.arange(len(x))
    for _ in range(1 if cell.is_simplex else _NEWTON_STEPS):
        values, gradients = cell.shape_values(xi[active]), cell.shape_gradients(xi[active])
        mine = corners[active]
        residual = x[active] - np.einsum("nk,nkx->nx", values, mine)
        jacobian = np.einsum("nkd,nkx->nxd", gradients, mine)
        step = np.linalg.solve(jacobian, residual[..., None])[..., 0]
        # Points far outside of a bent cell may have no coordinates: they stay near the cell.
        xi[active] = np.clip(xi[active] + step, -2.0, 3.0)
        active = active[np.abs(step).max(axis=1) > 1e-14]
        if not len(active):
            break
    return xi


def _distance(cell: ReferenceCell, xi: NDArray[np.float64]) -> NDArray[np.float64]:
    below = (-xi).max(axis=1)
    above = xi.sum(axis=1) - 1 if cell.is_simplex else (xi - 1).max(axis=1)
    return np.maximum(np.maximum(below, above), 0.0)
