"""The pieces of a mesh that are not connected with each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from mpigrad.fem.mesh import Mesh

__all__ = ["pieces_of_cells"]


def pieces_of_cells(mesh: Mesh) -> tuple[int, NDArray[np.int64]]:
    """Return the number of pieces of a mesh, and the piece of each cell of this rank (collective).

    Cells that share a vertex belong to one piece. Only the connections between pieces of ranks
    travel.
    """
    vertices, comm = mesh.vertices, mesh.comm
    n = len(mesh.points)
    corners = mesh.cells.shape[1]
    first = np.repeat(mesh.cells[:, 0], corners)
    count, here = _components(first, mesh.cells.ravel(), n)
    counts = comm.mpi.allgather(count)
    here = here + sum(counts[: comm.rank])
    owners = vertices.append_ghosts(here[: vertices.n_local])
    links = np.unique(np.column_stack([here, owners])[vertices.n_local :], axis=0)
    links = np.concatenate(comm.mpi.allgather(links)).reshape(-1, 2)
    total, number = _components(links[:, 0], links[:, 1], sum(counts))
    return total, number[here[mesh.cells[:, 0]]]


def _components(
    a: NDArray[np.integer], b: NDArray[np.integer], n: int
) -> tuple[int, NDArray[np.int64]]:
    """Return the number of components of a graph of n vertices, and the component of each one."""
    graph = coo_array((np.ones(len(a), np.int8), (a, b)), shape=(n, n))
    count, component = connected_components(graph, directed=False)
    return int(count), component.astype(np.int64)
