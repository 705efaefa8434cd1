"""Distribute a mesh that rank 0 has as arrays, and divide its cells into parts."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import BlockingCall, Communicator, resolve
from mpigrad.fem.cells import check_cell_type, import_package, reference_cell
from mpigrad.fem.mesh import FacetTags, Mesh, match_facets
from mpigrad.fem.numbering import repeated_rows, row_groups, unique_numbers
from mpigrad.fem.piece import Piece, bandwidth_order, build_mesh, corner_jacobians

__all__ = [
    "METHODS",
    "MeshArrays",
    "bisect_coordinates",
    "cell_neighbors",
    "distribute_arrays",
    "distribute_mesh",
    "partition_cells",
]

# ---- Divide the cells of a mesh into parts: by METIS, or by cuts across the coordinates ----


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


# ---- Distribute a mesh that rank 0 has as arrays ----


@dataclass(frozen=True)
class MeshArrays:
    """A whole mesh as arrays, as `distribute_mesh` takes it.

    Attributes
    ----------
    further_cell_tags
        Rows of a cell and one more tag of it, shape (k, 2).
    unused_groups
        As in `Mesh`.
    """

    points: Any
    cells: Any
    cell_type: str
    cell_tags: Any = None
    facets: Any = None
    facet_tags: Any = None
    cell_groups: Mapping[str, int] | None = None
    facet_groups: Mapping[str, int] | None = None
    further_cell_tags: NDArray[np.integer] | None = None
    unused_groups: Mapping[str, str] | None = None


def distribute_mesh(
    points: ArrayLike | None = None,
    cells: ArrayLike | None = None,
    cell_type: str = "",
    *,
    cell_tags: ArrayLike | None = None,
    facets: ArrayLike | None = None,
    facet_tags: ArrayLike | None = None,
    cell_groups: Mapping[str, int] | None = None,
    facet_groups: Mapping[str, int] | None = None,
    corner_order: Literal["vtk", "basix"] = "vtk",
    partition: str | ArrayLike = "auto",
    reorient: bool = False,
    drop_unused: bool = False,
    comm: Communicator | None = None,
) -> Mesh:
    """Distribute a mesh from arrays of rank 0 over all ranks (collective).

    Only rank 0 reads the arguments. On other ranks they may be left out, except `comm`. Cells are
    divided among the ranks, and each rank numbers its vertices so that matrices have a small
    bandwidth. The mesh has the numbers of these arrays as `cell_ids` and `vertex_ids`.

    Parameters
    ----------
    points
        Coordinates of the vertices, shape (n, dim), with dim 2 or 3. For cells with two dimensions
        a third coordinate may be given if it is the same at all vertices.
    cells
        The corners of each cell, shape (m, n_corners): rows of `points`.
    cell_type
        "triangle", "quadrilateral", "tetrahedron" or "hexahedron".
    cell_tags
        An integer for each cell, shape (m,). Default: zeros.
    facets, facet_tags
        The corners of facets with tags, shape (k, corners of a facet), in any order, and their
        tags, shape (k,). A facet with several tags has several rows.
    cell_groups, facet_groups
        Names of tags. A tag without a name gets its number as a name. A name whose tag no cell or
        facet has is in `Mesh.unused_groups`.
    corner_order
        "vtk": the corners of quadrilaterals and of the bottom and the top of hexahedra go around,
        as in VTK, gmsh and meshio. "basix": x runs fastest.
    partition
        "metis", "coordinates", "auto" (METIS if pymetis is installed), or the rank of each cell,
        shape (m,).
    reorient
        True to turn cells around whose corners are numbered in the wrong direction.
    drop_unused
        True to leave out vertices without cells. The numbers of the others then count only these.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Mesh

    Raises
    ------
    TypeError, ValueError
        On all ranks: if arrays do not fit, cells are degenerate or inverted or occur twice, a
        vertex has no cell, a facet with a tag is not a facet of a cell, or there are more ranks
        than cells.

    Examples
    --------
    >>> from mpigrad import fem
    >>> points = [[0, 0], [1, 0], [1, 1], [0, 1]]
    >>> mesh = fem.distribute_mesh(
    ...     points, [[0, 1, 2], [0, 2, 3]], "triangle", facets=[[3, 0]], facet_tags=[7]
    ... )
    >>> mesh.facets(7).centers()
    array([[0. , 0.5]])
    """
    comm = resolve(comm)
    arrays = MeshArrays(
        points, cells, cell_type, cell_tags, facets, facet_tags, cell_groups, facet_groups
    )
    return distribute_arrays(
        "fem.distribute_mesh",
        comm,
        lambda: arrays,
        corner_order=corner_order,
        partition=partition,
        reorient=reorient,
        drop_unused=drop_unused,
    )


def distribute_arrays(
    function: str,
    comm: Communicator,
    read: Any,
    *,
    corner_order: str,
    partition: str | ArrayLike,
    reorient: bool,
    drop_unused: bool,
) -> Mesh:
    """Distribute the mesh that `read()` returns on rank 0 (collective)."""
    common: Any = None
    pieces: Any = iter(())
    with raise_on_all_ranks(comm):
        try:
            if comm.rank == 0:
                whole = _check(function, read(), corner_order, reorient, drop_unused)
                parts, method = partition_cells(
                    whole.points, whole.cells, whole.cell_type, comm.size, partition, function
                )
                common = (
                    whole.cell_type, len(whole.points), len(whole.cells), method,
                    whole.cell_groups, whole.facet_groups, whole.unused_groups,
                )  # fmt: skip
                pieces = _divide(whole, parts, comm.size)
        finally:
            # Rank 0 may take any time to read and divide a large mesh.
            with BlockingCall("rank 0's division of a mesh", unlimited=True):
                comm.mpi.Ibarrier().Wait()
    cell_type, n_vertices, n_cells, method, cell_groups, facet_groups, unused = comm.mpi.bcast(
        common
    )
    local_arrays: tuple[NDArray[Any], ...]
    if comm.rank == 0:
        local_arrays = next(pieces)
        for rank, arrays in enumerate(pieces, 1):
            for array in arrays:
                comm.send_object(array, rank)
    else:
        local_arrays = tuple(comm.receive_object(0) for _ in range(9))
    corners, cell_ids, cell_tags, further, vertex_ids, points, *facets = local_arrays
    piece = Piece(
        corners=corners,
        cell_ids=cell_ids,
        cell_tags=cell_tags,
        further_cell_tags=further,
        vertex_ids=vertex_ids,
        points=points,
        vertex_keys=bandwidth_order(corners, len(points), cell_type),
        facets=FacetTags(*facets),
    )
    return build_mesh(
        function,
        comm,
        cell_type,
        piece,
        n_vertices=n_vertices,
        n_cells=n_cells,
        method=method,
        cell_groups=cell_groups,
        facet_groups=facet_groups,
        unused_groups=unused,
    )


@dataclass(frozen=True)
class _Whole:
    """The whole mesh on rank 0: checked, with corners in the order of basix."""

    points: NDArray[np.float64]
    cells: NDArray[np.int64]
    cell_type: str
    cell_tags: NDArray[np.int32]
    further_cell_tags: NDArray[np.int32]
    facet_cells: NDArray[np.int64]
    local_facets: NDArray[np.int8]
    facet_tags: NDArray[np.int32]
    cell_groups: dict[str, int]
    facet_groups: dict[str, int]
    unused_groups: dict[str, str]


def _check(
    function: str, arrays: MeshArrays, corner_order: str, reorient: bool, drop_unused: bool
) -> _Whole:
    cell = reference_cell(check_cell_type(function, arrays.cell_type))
    if corner_order not in ("vtk", "basix"):
        raise ValueError(
            f"{function}: expected corner_order to be 'vtk' or 'basix', got {corner_order!r}. "
            "Choose one of them."
        )
    points = _points(function, arrays.points, cell.dim)
    cells = _rows(function, "cells", arrays.cells, cell.n_corners, len(points))
    if corner_order == "vtk":
        cells = cells[:, np.argsort(cell.names.vtk_order)]
    repeated = np.sort(cells, axis=1)
    repeated = np.flatnonzero((repeated[:, 1:] == repeated[:, :-1]).any(axis=1))
    if repeated.size:
        raise ValueError(
            f"{function}: cell {repeated[0]} must have {cell.n_corners} different corners, got "
            f"{cells[repeated[0]].tolist()}. Remove it from the mesh."
        )
    same = repeated_rows(cells)
    if same.size:
        corners = np.sort(cells[same], axis=1)
        other = same[1:][np.all(corners[1:] == corners[0], axis=1)][0]
        raise ValueError(
            f"{function}: expected cells with different corners, got the corners "
            f"{cells[same[0]].tolist()} in the cells {same[0]} and {other} ({same.size} cells have "
            "the corners of another one). Remove one of each."
        )
    facets = np.zeros((0, cell.facets.shape[1]), np.int64)
    if arrays.facets is not None and len(arrays.facets):
        facets = _rows(function, "facets", arrays.facets, cell.facets.shape[1], len(points))
    if drop_unused:
        used, cells = unique_numbers(cells, len(points))
        place = np.full(len(points), -1, np.int64)
        place[used] = np.arange(len(used))
        points, facets = points[used], place[facets]
        if facets.size and facets.min() < 0:
            raise ValueError(
                f"{function}: the corners of a facet with a tag must belong to cells, got facet "
                f"{int(np.flatnonzero((facets < 0).any(axis=1))[0])} with a vertex without cells. "
                "Remove it from the mesh."
            )
    if reorient:
        inverted = corner_jacobians(points, cells, cell.name)[0].max(axis=1) < 0
        cells[inverted] = cells[inverted][:, cell.names.mirror]
    cell_tags = _tags(function, "cell_tags", arrays.cell_tags, len(cells))
    facet_tags = _tags(function, "facet_tags", arrays.facet_tags, len(facets))
    facet_cells, local_facets = _find_facets(function, cells, cell.name, facets, len(points))
    further = np.zeros((0, 2), np.int32)
    if arrays.further_cell_tags is not None:
        further = np.asarray(arrays.further_cell_tags, np.int32)
    tagged = np.concatenate([cell_tags[cell_tags != 0], further[:, 1]])
    cell_groups, without_cells = _groups(function, arrays.cell_groups, tagged)
    facet_groups, without_facets = _groups(function, arrays.facet_groups, facet_tags)
    unused = dict.fromkeys(without_facets, "a group of facets without members")
    unused |= dict.fromkeys(without_cells, "a group of cells without members")
    return _Whole(
        points=points,
        cells=cells,
        cell_type=cell.name,
        cell_tags=cell_tags,
        further_cell_tags=further,
        facet_cells=facet_cells,
        local_facets=local_facets,
        facet_tags=facet_tags,
        cell_groups=cell_groups,
        facet_groups=facet_groups,
        unused_groups=dict(arrays.unused_groups or {}) | unused,
    )


def _points(function: str, points: Any, dim: int) -> NDArray[np.float64]:
    array: NDArray[Any] = np.asarray([] if points is None else points, float)
    if array.ndim != 2 or array.shape[1] not in (dim, 3):
        raise ValueError(
            f"{function}: points must have the shape (n, {dim}) on rank 0, got {array.shape}. Give "
            "one row for each vertex."
        )
    if array.shape[1] > dim:
        if len(array) and np.ptp(array[:, 2]) > 1e-12 * np.ptp(array, axis=0).max():
            raise ValueError(
                f"{function}: expected cells with two dimensions in a plane of constant z, got z "
                f"from {array[:, 2].min():g} to {array[:, 2].max():g}. Surfaces in space are not "
                "supported."
            )
        array = array[:, :dim]
    return np.ascontiguousarray(array)


def _rows(function: str, name: str, rows: Any, width: int, n: int) -> NDArray[np.int64]:
    array: NDArray[Any] = np.asarray([] if rows is None else rows)
    if array.ndim != 2 or array.shape[1] != width or array.dtype.kind not in "iu":
        raise ValueError(
            f"{function}: {name} must be integers of shape (k, {width}) on rank 0, got dtype "
            f"{array.dtype} and shape {array.shape}. Give the corners of each."
        )
    if array.size and (array.min() < 0 or array.max() >= n):
        raise ValueError(
            f"{function}: {name} must have numbers of vertices from 0 to {n - 1}, got "
            f"{array.min()} to {array.max()}. Count the vertices from 0."
        )
    return array.astype(np.int64)


def _tags(function: str, name: str, tags: Any, n: int) -> NDArray[np.int32]:
    array = np.zeros(n, np.int32) if tags is None else np.asarray(tags)
    if array.shape == (n, 1):
        array = array[:, 0]
    whole = array.dtype.kind in "iu" or (array.dtype.kind == "f" and np.all(array % 1 == 0))
    if array.shape != (n,) or not whole:
        raise ValueError(
            f"{function}: {name} must be {n} integers, got dtype {array.dtype} and shape "
            f"{array.shape}. Give one tag for each row."
        )
    return array.astype(np.int32)


def _groups(
    function: str, names: Mapping[str, int] | None, tags: NDArray[np.int32]
) -> tuple[dict[str, int], list[str]]:
    """Return the tags by name, and the names whose tags no cell or facet has."""
    groups = {str(name): int(tag) for name, tag in (names or {}).items()}
    present = set(np.unique(tags).tolist())
    unnamed = sorted(present - set(groups.values()))
    for tag in unnamed:
        if str(tag) in groups:
            raise ValueError(
                f"{function}: expected names of groups that are not the number of another tag, got "
                f"{str(tag)!r} for the tag {groups[str(tag)]}, and a tag {tag} without a name. "
                "Rename the group."
            )
    empty = [name for name, tag in groups.items() if tag not in present]
    used = {name: tag for name, tag in groups.items() if tag in present}
    return used | {str(tag): tag for tag in unnamed}, empty


def _find_facets(
    function: str,
    cells: NDArray[np.int64],
    cell_type: str,
    facets: NDArray[np.int64],
    n_points: int,
) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """Return for each facet the lowest cell that has it, and its number in that cell."""
    if not len(facets):
        return np.zeros(0, np.int64), np.zeros(0, np.int8)
    table = reference_cell(cell_type).facets
    # Only facets whose corners all have a tag can be among them.
    corner = np.zeros(n_points, bool)
    corner[facets] = True
    near = np.flatnonzero(corner[cells].sum(axis=1) >= table.shape[1])
    corners = cells[near][:, table].reshape(-1, table.shape[1])
    rows = np.flatnonzero(corner[corners].all(axis=1))
    both = np.sort(np.concatenate([corners[rows], facets]), axis=1)
    inverse, n_groups = row_groups(both, n_points)
    # Rows are written from the last to the first one, so the lowest cell stays.
    row_of = np.full(n_groups, -1, np.int64)
    row_of[inverse[: len(rows)][::-1]] = rows[::-1]
    positions = row_of[inverse[len(rows) :]]
    if np.any(positions < 0):
        wrong = facets[np.flatnonzero(positions < 0)[0]]
        raise ValueError(
            f"{function}: a facet with a tag must be a facet of a cell, got corners "
            f"{wrong.tolist()}. Remove it from the mesh."
        )
    return near[positions // len(table)], (positions % len(table)).astype(np.int8)


def _divide(whole: _Whole, parts: NDArray[np.int64], size: int) -> Any:
    """Yield the arrays of each rank."""
    order = np.argsort(parts, kind="stable")
    ends = np.cumsum(np.bincount(parts, minlength=size))
    facet_parts = parts[whole.facet_cells]
    further_parts = parts[whole.further_cell_tags[:, 0]]
    for rank, end in enumerate(ends):
        ids = order[(ends[rank - 1] if rank else 0) : end]
        vertex_ids, corners = unique_numbers(whole.cells[ids], len(whole.points))
        facets = np.flatnonzero(facet_parts == rank)
        further = whole.further_cell_tags[further_parts == rank]
        yield (
            corners.astype(np.int32),
            ids.astype(np.int64),
            whole.cell_tags[ids],
            np.column_stack([np.searchsorted(ids, further[:, 0]), further[:, 1]]).astype(np.int32),
            vertex_ids.astype(np.int64),
            whole.points[vertex_ids],
            np.searchsorted(ids, whole.facet_cells[facets]).astype(np.int32),
            whole.local_facets[facets],
            whole.facet_tags[facets],
        )
