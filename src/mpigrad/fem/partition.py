"""Divide the cells of a mesh into parts: by METIS, or by cuts across the coordinates."""

from __future__ import annotations

import importlib.util

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpigrad.fem.facet_table import match_facets
from mpigrad.fem.packages import import_package
from mpigrad.fem.reference import reference_cell

__all__ = ["METHODS", "bisect_coordinates", "cell_neighbors", "partition_cells"]

METHODS = ("auto", "metis", "coordinates")


def partition_cells(
    points: NDArray[np.float64],
    cells: NDArray[np.integer],
    cell_type: str,
    n_parts: int,
    method: str | ArrayLike = "auto",
    function: str = "partition_cells",
) -> tuple[NDArray[np.int64], str]:
    """Return the part of each cell, and the name of the method that was used.

    Parameters
    ----------
    points
        Coordinates of all vertices, shape (n, dim).
    cells
        The corners of all cells in basix' order, shape (m, n_corners).
    cell_type
        The type of the cells.
    n_parts
        The number of parts: of ranks.
    method
        "metis" cuts few facets (pymetis has to be installed). "coordinates" bisects the centres of
        the cells again and again, across the longest axis. "auto" takes METIS if it is installed.
        An array of shape (m,) gives the part of each cell.
    function
        The public function that errors name.

    Raises
    ------
    ValueError
        If there are fewer cells than parts, or `method` is not valid.
    ImportError
        If pymetis was asked for and is not installed.
    """
    n_cells = len(cells)
    if n_cells < n_parts:
        raise ValueError(
            f"{function}: expected at least one cell for each of the {n_parts} ranks, got "
            f"{n_cells} cells. Start fewer ranks or refine the mesh."
        )
    if not isinstance(method, str):
        return _check_parts(np.asarray(method), n_cells, n_parts, function), "given"
    if method not in METHODS:
        raise ValueError(
            f"{function}: expected partition to be one of {', '.join(METHODS)}, or the rank of "
            f"each cell, got {method!r}. Choose one of them."
        )
    if n_parts == 1:
        return np.zeros(n_cells, np.int64), "coordinates" if method == "auto" else method
    if method == "auto":
        installed = importlib.util.find_spec("pymetis") is not None
        method = "metis" if installed else "coordinates"
    if method == "metis":
        parts = _metis(cells, cell_type, len(points), n_parts, function)
        # METIS leaves parts of a few cells empty now and then.
        if len(np.unique(parts)) == n_parts:
            return parts, method
    return bisect_coordinates(points[cells].mean(axis=1), n_parts), "coordinates"


def _check_parts(
    parts: NDArray[np.generic], n_cells: int, n_parts: int, function: str
) -> NDArray[np.int64]:
    if parts.shape != (n_cells,) or parts.dtype.kind not in "iu":
        raise ValueError(
            f"{function}: partition must have one integer for each of the {n_cells} cells, got "
            f"dtype {parts.dtype} and shape {parts.shape}. Give the rank of each cell."
        )
    result = parts.astype(np.int64)
    if result.min() < 0 or result.max() >= n_parts:
        raise ValueError(
            f"{function}: partition must have ranks from 0 to {n_parts - 1}, got "
            f"{result.min()} to {result.max()}. Give the rank of each cell."
        )
    missing = np.setdiff1d(np.arange(n_parts), result)
    if missing.size:
        raise ValueError(
            f"{function}: partition must give a cell to every rank, got none for rank "
            f"{missing[0]}. Give each rank a cell, or start fewer ranks."
        )
    return result


def bisect_coordinates(centers: NDArray[np.float64], n_parts: int) -> NDArray[np.int64]:
    """Return the part of each cell by recursive bisection across the longest axis.

    The numbers of cells of two parts differ by at most two.

    Parameters
    ----------
    centers
        The centre of each cell, shape (m, dim), with m >= n_parts.
    """
    parts = np.zeros(len(centers), np.int64)
    stack = [(np.arange(len(centers)), 0, n_parts)]
    while stack:
        members, first, count = stack.pop()
        if count == 1:
            parts[members] = first
            continue
        box = centers[members]
        axis = int(np.argmax(box.max(axis=0) - box.min(axis=0)))
        left = count // 2
        cut = len(members) * left // count
        # Ties are broken by the other coordinates, so that parts stay connected on a lattice.
        order = np.lexsort([*(box[:, a] for a in range(box.shape[1]) if a != axis), box[:, axis]])
        stack.append((members[order[:cut]], first, left))
        stack.append((members[order[cut:]], first + left, count - left))
    return parts


def cell_neighbors(
    cells: NDArray[np.integer], cell_type: str, n_points: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cells across the facets of each cell.

    Returns
    -------
    starts, neighbors
        Cell i has the neighbours `neighbors[starts[i]:starts[i + 1]]`.
    """
    table = reference_cell(cell_type).facets
    corners = cells[:, table].reshape(-1, table.shape[1])
    first, second, count = match_facets(corners, n_points)
    inner = count > 1
    a, b = first[inner] // len(table), second[inner] // len(table)
    sources, targets = np.concatenate([a, b]), np.concatenate([b, a])
    order = np.argsort(sources, kind="stable")
    degrees = np.bincount(sources, minlength=len(cells))
    starts = np.concatenate([[0], np.cumsum(degrees)])
    return starts.astype(np.int64), targets[order].astype(np.int64)


def _metis(
    cells: NDArray[np.integer], cell_type: str, n_points: int, n_parts: int, function: str
) -> NDArray[np.int64]:
    pymetis = import_package("pymetis", f"{function}(partition='metis')")
    starts, neighbors = cell_neighbors(cells, cell_type, n_points)
    kind = pymetis.zero_copy_dtype()
    graph = pymetis.CSRAdjacency(starts.astype(kind), neighbors.astype(kind))
    return np.asarray(pymetis.part_graph(n_parts, graph).vertex_part, np.int64)
