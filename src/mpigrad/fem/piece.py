"""The cells of one rank: their checks and order, and the mesh that is made of all pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from mpigrad.collective_errors import raise_error
from mpigrad.communicator import Communicator
from mpigrad.fem.cells import reference_cell
from mpigrad.fem.mesh import FacetTags, Mesh
from mpigrad.fem.numbering import Numbering, Route

__all__ = [
    "Piece",
    "bandwidth_order",
    "build_mesh",
    "check_cells",
    "corner_jacobians",
]

# ---- Order the vertices of a rank so that matrices on them have a small bandwidth ----


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


# ---- Find cells that have no volume or are turned inside out ----


# A cell is degenerate if its Jacobian is smaller than this, relative to the product of its edges.
_SMALLEST = 1e-12
_CHUNK = 1 << 18  # cells whose Jacobians are in memory at one time


def corner_jacobians(
    points: NDArray[np.float64], cells: NDArray[np.integer], cell_type: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the determinants of the Jacobian at the corners of each cell, and their bounds.

    The Jacobian is that of the map from the reference cell. It is constant in triangles and
    tetrahedra. The bound of a determinant is the product of the lengths of its columns.

    Returns
    -------
    determinants, bounds
        Shape (n_cells, 1) for triangles and tetrahedra, else (n_cells, n_corners).
    """
    cell = reference_cell(cell_type)
    places = cell.points[:1] if cell.is_simplex else cell.points
    gradients = cell.shape_gradients(places)
    result = np.empty((2, len(cells), len(places)))
    for first in range(0, len(cells), _CHUNK):
        chunk = slice(first, first + _CHUNK)
        corners = points[cells[chunk]]  # (chunk, n_corners, dim)
        jacobians = np.einsum("qkd,ckx->cqxd", gradients, corners, optimize=True)
        result[0, chunk] = _determinants(jacobians)
        result[1, chunk] = np.sqrt((jacobians**2).sum(axis=-2)).prod(axis=-1)
    return result[0], result[1]


def check_cells(
    function: str,
    points: NDArray[np.float64],
    cells: NDArray[np.integer],
    cell_type: str,
    cell_ids: NDArray[np.int64],
) -> ValueError | None:
    """Return an error that names the first cell without a positive Jacobian, or None."""
    finite = np.isfinite(points).all(axis=1)
    if not finite.all():
        wrong = int(np.flatnonzero(~finite)[0])
        return ValueError(
            f"{function}: expected finite coordinates, got {points[wrong].tolist()}. Repair the "
            "mesh."
        )
    determinants, bounds = corner_jacobians(points, cells, cell_type)
    smallest, largest = determinants.min(axis=1), determinants.max(axis=1)
    flat = (np.abs(determinants) <= _SMALLEST * bounds).any(axis=1)
    for wrong, what, remedy in (
        (flat, "degenerate", "Remove it, or move its vertices."),
        (
            largest < 0,
            "inverted",
            "Give its corners in the other order: reorient=True does it for all such cells.",
        ),
        (smallest < 0, "folded", "Make it convex."),
    ):
        if np.any(wrong):
            index = int(np.flatnonzero(wrong)[0])
            return ValueError(
                f"{function}: expected cells with a positive Jacobian, got {what} cell "
                f"{cell_ids[index]} with the Jacobian {determinants[index].min():.3g} (one of "
                f"{np.count_nonzero(wrong)} such cells of this rank). {remedy}"
            )
    return None


def _determinants(matrices: NDArray[np.float64]) -> NDArray[np.float64]:
    m = matrices
    if m.shape[-1] == 2:
        return m[..., 0, 0] * m[..., 1, 1] - m[..., 0, 1] * m[..., 1, 0]
    return (
        m[..., 0, 0] * (m[..., 1, 1] * m[..., 2, 2] - m[..., 1, 2] * m[..., 2, 1])
        - m[..., 0, 1] * (m[..., 1, 0] * m[..., 2, 2] - m[..., 1, 2] * m[..., 2, 0])
        + m[..., 0, 2] * (m[..., 1, 0] * m[..., 2, 1] - m[..., 1, 1] * m[..., 2, 0])
    )


# ---- The cells of one rank before vertices have owners, and the mesh that is made of all
# pieces


@dataclass(frozen=True)
class Piece:
    """The cells of one rank, with the numbers of the file.

    Attributes
    ----------
    corners
        The corners of each cell in basix' order, shape (n_cells, n_corners): rows of `vertex_ids`.
    cell_ids, cell_tags
        The file's number and the first tag of each cell, shape (n_cells,).
    further_cell_tags
        Rows of a cell and one more tag of it, shape (k, 2).
    vertex_ids
        The file's number of each vertex of these cells, without repetition, shape (n,).
    points
        The coordinates of these vertices, shape (n, dim).
    vertex_keys
        The order in which this rank numbers those of the vertices that it will own, shape (n,).
    facets
        Rows of cells, local facets and tags of the facets with tags.
    """

    corners: NDArray[np.integer]
    cell_ids: NDArray[np.int64]
    cell_tags: NDArray[np.int32]
    further_cell_tags: NDArray[np.int32]
    vertex_ids: NDArray[np.int64]
    points: NDArray[np.float64]
    vertex_keys: NDArray[np.integer]
    facets: FacetTags


def build_mesh(
    function: str,
    comm: Communicator,
    cell_type: str,
    piece: Piece,
    *,
    n_vertices: int,
    n_cells: int,
    method: str,
    cell_groups: Mapping[str, int],
    facet_groups: Mapping[str, int],
    unused_groups: Mapping[str, str] | None = None,
    check: bool = True,
) -> Mesh:
    """Number the vertices of all pieces, and return the mesh (collective).

    Parameters
    ----------
    function
        The public function that errors name.
    n_vertices, n_cells
        The numbers of vertices and cells of the file.
    unused_groups
        As in `Mesh`.
    method
        The name of the method that has divided the cells.
    check
        True if cells may be degenerate or inverted.
    """
    owners, hanging = _find_owners(comm, piece.vertex_ids, n_vertices)
    error = None
    if hanging.size:
        error = ValueError(
            f"{function}: every vertex must belong to a cell, got vertex {hanging[0]} without "
            "cells. Remove it from the mesh."
        )
    raise_error(comm, error)

    local = np.flatnonzero(owners == comm.rank)
    local = local[np.argsort(piece.vertex_keys[local], kind="stable")]
    others = np.flatnonzero(owners != comm.rank)
    # Owners say the numbers of the vertices that other ranks read.
    offset = int(comm.mpi.scan(len(local))) - len(local)
    route = Route(comm, owners[others])
    asked = route.forward(piece.vertex_ids[others])
    by_id = np.argsort(piece.vertex_ids[local])
    place = np.searchsorted(piece.vertex_ids[local], asked, sorter=by_id)
    numbers = route.back((offset + by_id[place]).astype(np.int64))

    vertices = Numbering(len(local), numbers, comm)
    others = others[np.argsort(numbers)]
    order = np.concatenate([local, others])
    position = np.empty(len(order), np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    corners = position[piece.corners]
    # Cells follow their vertices, so that neighbours in the mesh are neighbours in memory.
    by_vertex = np.argsort(corners.min(axis=1), kind="stable")
    cell_position = np.empty(len(by_vertex), np.int32)
    cell_position[by_vertex] = np.arange(len(by_vertex), dtype=np.int32)
    facets = FacetTags(
        cell_position[piece.facets.cells], piece.facets.local_facets, piece.facets.tags
    )
    further = piece.further_cell_tags
    mesh = Mesh(
        comm=comm,
        cell_type=cell_type,
        points=np.ascontiguousarray(piece.points[order]),
        cells=np.ascontiguousarray(corners[by_vertex]),
        vertices=vertices,
        cell_ids=piece.cell_ids[by_vertex],
        vertex_ids=piece.vertex_ids[local],
        cell_tags=piece.cell_tags[by_vertex],
        further_cell_tags=np.column_stack([cell_position[further[:, 0]], further[:, 1]]),
        facet_tags=facets.sorted(),
        cell_groups=dict(cell_groups),
        facet_groups=dict(facet_groups),
        unused_groups=dict(unused_groups or {}),
        n_cells_global=n_cells,
        partition_method=method,
    )
    if check:
        raise_error(comm, check_cells(function, mesh.points, mesh.cells, cell_type, mesh.cell_ids))
    return mesh


def _find_owners(
    comm: Communicator, vertex_ids: NDArray[np.int64], n_vertices: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the owner of each vertex, and vertices without cells among those of this rank's range.

    The owner is the lowest rank that has a cell of the vertex. No rank knows all vertices: rank r
    hears of those in the r-th of equal ranges of the file's numbers.
    """
    width = max(1, -(-n_vertices // comm.size))
    route = Route(comm, vertex_ids // width)
    first = min(comm.rank * width, n_vertices)
    heard = route.forward(vertex_ids) - first
    owners = np.full(min(width, n_vertices - first), comm.size, np.int64)
    np.minimum.at(owners, heard, route.sources)
    hanging = first + np.flatnonzero(owners == comm.size)
    return route.back(owners[heard]), hanging
