"""Values of fields at given points, differentiable across ranks."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from numpy.typing import ArrayLike, NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_error, raise_on_all_ranks
from mpigrad.fem.point_search import find_points
from mpigrad.fem.space import Space
from mpigrad.operations import allgatherv
from mpigrad.operations.indexing import take
from mpigrad.sparse.matrix.ghost_exchange import index_array

__all__ = ["Observation"]


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
        found = find_points(mesh.points, mesh.cells, mesh.cell_type, mesh.cell_ids, places)

        # The cell in which the point lies best has it, among equals the cell with the lowest id.
        distance = found.distances.copy()
        comm.mpi.Allreduce(MPI.IN_PLACE, distance, MPI.MIN)
        outside = np.flatnonzero(~np.isfinite(distance))
        error = None
        if outside.size:
            error = ValueError(
                f"fem.Observation: the points must be in the mesh, got {len(outside)} points "
                f"outside of it, the first of them {places[outside[0]].tolist()}. Remove them."
            )
        raise_error(comm, error)
        best = found.distances <= distance
        own_ids = np.full(len(places), np.iinfo(np.int64).max)
        own_ids[best] = mesh.cell_ids[found.cells[best]]
        lowest = own_ids.copy()
        comm.mpi.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)

        self.n_points = len(places)
        self.indices: NDArray[np.intp] = np.flatnonzero(best & (own_ids == lowest))
        self.cells: NDArray[np.int32] = found.cells[self.indices].astype(np.int32)
        self.coordinates: NDArray[np.float64] = found.coordinates[self.indices]
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
