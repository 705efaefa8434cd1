"""Values of fields at given points, differentiable across ranks."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from numpy.typing import ArrayLike, NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_error, raise_on_all_ranks
from mpigrad.extend import index_array, take
from mpigrad.fem.cells import ReferenceCell, reference_cell
from mpigrad.fem.space import Space
from mpigrad.operations import allgatherv

__all__ = [
    "FoundPoints",
    "Observation",
    "find_points",
    "morton_keys",
    "reference_coordinates",
]

# ---- Order points along a curve that keeps neighbours together ----


# For each dimension the bits of a coordinate, and the steps that spread them out.
_SPREAD = {
    2: (
        31,
        (
            (16, 0x0000FFFF0000FFFF),
            (8, 0x00FF00FF00FF00FF),
            (4, 0x0F0F0F0F0F0F0F0F),
            (2, 0x3333333333333333),
            (1, 0x5555555555555555),
        ),
    ),
    3: (
        20,
        (
            (32, 0x001F00000000FFFF),
            (16, 0x001F0000FF0000FF),
            (8, 0x100F00F00F00F00F),
            (4, 0x10C30C30C30C30C3),
            (2, 0x1249249249249249),
        ),
    ),
}


def morton_keys(points: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return the positions of points on the Z-order curve (Morton, 1966).

    The bits of the coordinates, relative to the smallest cube around the points, alternate in the
    key. Points that follow each other in the order of the keys are mostly near each other.

    Parameters
    ----------
    points
        Coordinates of shape (n, 2) or (n, 3).
    """
    dim = points.shape[1]
    bits, steps = _SPREAD[dim]
    keys = np.zeros(len(points), np.uint64)
    if not len(points):
        return keys
    low = points.min(axis=0)
    size = float((points.max(axis=0) - low).max()) or 1.0
    scale = (2.0**bits - 1) / size
    for axis in range(dim):
        value = np.nan_to_num((points[:, axis] - low[axis]) * scale).astype(np.uint64)
        for shift, mask in steps:
            value = (value | value << np.uint64(shift)) & np.uint64(mask)
        keys |= value << np.uint64(axis)
    return keys


# ---- Find the cells that contain points ----


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
    best_cells = np.full(m, -1, np.int64)
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
        best_cells[place] = candidate[chosen]
        distances[place] = outside[chosen]
        coordinates[place] = x[chosen]
    return FoundPoints(best_cells, coordinates, distances)


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
        active_corners = corners[active]
        residual = x[active] - np.einsum("nk,nkx->nx", values, active_corners)
        jacobian = np.einsum("nkd,nkx->nxd", gradients, active_corners)
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


# ---- Values of fields at given points, differentiable across ranks ----


class Observation:
    """Evaluate fields of a space at points: a linear map with an exact transpose (collective).

    Each point is evaluated on one rank, in a cell that contains it. If several cells contain it,
    the cell with the lowest number in the file is taken, on any number of ranks.

    Parameters
    ----------
    space
        The space of the fields.
    points
        The points, shape (m, dim), the same on all ranks.

    Attributes
    ----------
    space
        The space.
    n_points
        The number of points, m.
    indices
        The points that this rank evaluates, as rows of `points`, sorted, shape (k,).
    cells
        The cell of each of them, shape (k,).
    coordinates
        The coordinates of each of them in the reference cell, shape (k, dim).

    Raises
    ------
    ValueError
        On all ranks: if the points have another shape, differ between ranks or lie outside of the
        mesh.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad import fem
    >>> space = fem.Space(fem.box((4, 4), (1.0, 1.0)), degree=2)
    >>> u = jnp.asarray(space.interpolate(lambda x: x[:, 0] ** 2))
    >>> fem.Observation(space, [[0.5, 0.1], [0.9, 0.3]])(u).round(5)
    Array([0.25, 0.81], dtype=float32)
    """

    def __init__(self, space: Space, points: ArrayLike) -> None:
        self.space = space
        mesh = space.mesh
        comm = mesh.comm
        places = np.zeros((0, mesh.dim))
        with raise_on_all_ranks(comm):
            places = np.asarray(points, float)
            if places.ndim != 2 or places.shape[1] != mesh.dim or not np.isfinite(places).all():
                raise ValueError(
                    f"fem.Observation: points must be finite, with the shape (m, {mesh.dim}), got "
                    f"shape {places.shape} on rank {comm.rank}. Give one row for each point."
                )
        digest = places.shape, zlib.crc32(np.ascontiguousarray(places).tobytes())
        assert_same_on_all_ranks(comm, digest, "fem.Observation: shape and checksum of points")
        matches = find_points(mesh.points, mesh.cells, mesh.cell_type, mesh.cell_ids, places)

        # The cell in which the point lies best has it, among equals the cell with the lowest id.
        distance = matches.distances.copy()
        comm.mpi.Allreduce(MPI.IN_PLACE, distance, MPI.MIN)
        outside = np.flatnonzero(~np.isfinite(distance))
        error = None
        if outside.size:
            error = ValueError(
                f"fem.Observation: the points must be in the mesh, got {len(outside)} points "
                f"outside of it, the first of them {places[outside[0]].tolist()}. Remove them."
            )
        raise_error(comm, error)
        best = matches.distances <= distance
        own_ids = np.full(len(places), np.iinfo(np.int64).max)
        own_ids[best] = mesh.cell_ids[matches.cells[best]]
        lowest = own_ids.copy()
        comm.mpi.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)

        self.n_points = len(places)
        self.indices: NDArray[np.intp] = np.flatnonzero(best & (own_ids == lowest))
        self.cells: NDArray[np.int32] = matches.cells[self.indices].astype(np.int32)
        self.coordinates: NDArray[np.float64] = matches.coordinates[self.indices]
        table = space.element.tabulate(0, self.coordinates) if len(self.indices) else None
        self._weights = np.zeros((0, space.cell_nodes.shape[1]))
        if table is not None:
            self._weights = np.asarray(table[0, :, :, 0])
        ranks = comm.mpi.allgather(self.indices)
        self._counts = tuple(map(len, ranks))
        self._places = np.argsort(np.concatenate(ranks))

    def local(self, u: Any) -> jax.Array:
        """Return the values at the points of this rank (collective, differentiable).

        A loss that sums them over the points of this rank is this rank's share of the loss.

        Parameters
        ----------
        u
            A field of the space, shape (n_local,) or (n_local, components).

        Returns
        -------
        Values of shape (k,) or (k, components), in the order of `indices`.
        """
        everywhere = self.space.nodes.exchange.local_and_ghost(u)
        values = take(everywhere, self._node_index)
        values = values.reshape(*self._weights.shape, *everywhere.shape[1:])
        weights = jnp.asarray(self._weights, jnp.result_type(everywhere.dtype, "float32"))
        return jnp.einsum("kb,kb...->k...", weights, values)

    def __call__(self, u: Any) -> jax.Array:
        """Return the values at all points on every rank (collective, differentiable).

        Parameters
        ----------
        u
            A field of the space, shape (n_local,) or (n_local, components).

        Returns
        -------
        Values of shape (m,) or (m, components), the same on all ranks.
        """
        rows = allgatherv(self.local(u), self._counts, self.space.mesh.comm)
        return take(rows, index_array(self._places), unique=True)

    @functools.cached_property
    def _node_index(self) -> jax.Array:
        return index_array(self.space.cell_nodes[self.cells].reshape(-1).astype(np.int64))

    def __repr__(self) -> str:
        return f"Observation(n_points={self.n_points}, n_local={len(self.indices)})"
