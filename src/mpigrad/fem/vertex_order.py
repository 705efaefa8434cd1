"""Order the vertices of a rank so that matrices on them have a small bandwidth."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from mpigrad.fem.reference import reference_cell

__all__ = ["bandwidth_order"]


def bandwidth_order(
    corners: NDArray[np.integer], n_vertices: int, cell_type: str
) -> NDArray[np.int64]:
    """Return the place of each vertex in the order of reverse Cuthill and McKee.

    The graph has the edges of the cells, without diagonals (Cuthill & McKee, "Reducing the
    bandwidth of sparse symmetric matrices", 1969).

    Parameters
    ----------
    corners
        The corners of each cell, shape (n_cells, n_corners).
    n_vertices
        The number of vertices.
    cell_type
        The type of the cells.
    """
    edges = corners[:, reference_cell(cell_type).entities[1]].reshape(-1, 2).astype(np.int32)
    rows, columns = np.concatenate([edges, edges[:, ::-1]]).T
    entries = np.ones(len(rows), np.int8)
    graph = coo_array((entries, (rows, columns)), shape=(n_vertices, n_vertices)).tocsr()
    order = reverse_cuthill_mckee(graph, symmetric_mode=True)
    places = np.empty(n_vertices, np.int64)
    places[order] = np.arange(n_vertices)
    return places
