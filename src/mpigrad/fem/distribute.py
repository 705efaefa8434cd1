"""Distribute a mesh that rank 0 has as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import BlockingCall, Communicator, resolve
from mpigrad.fem.cell_checks import corner_jacobians
from mpigrad.fem.grouping import repeated_rows, row_groups, unique_numbers
from mpigrad.fem.mesh import FacetTags, Mesh
from mpigrad.fem.partition import partition_cells
from mpigrad.fem.piece import Piece, build_mesh
from mpigrad.fem.reference import check_cell_type, reference_cell
from mpigrad.fem.vertex_order import bandwidth_order

__all__ = ["MeshArrays", "distribute_arrays", "distribute_mesh"]


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
    own: tuple[NDArray[Any], ...]
    if comm.rank == 0:
        own = next(pieces)
        for rank, arrays in enumerate(pieces, 1):
            for array in arrays:
                comm.send_object(array, rank)
    else:
        own = tuple(comm.receive_object(0) for _ in range(9))
    corners, cell_ids, cell_tags, further, vertex_ids, points, *facets = own
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
    found = row_of[inverse[len(rows) :]]
    if np.any(found < 0):
        wrong = facets[np.flatnonzero(found < 0)[0]]
        raise ValueError(
            f"{function}: a facet with a tag must be a facet of a cell, got corners "
            f"{wrong.tolist()}. Remove it from the mesh."
        )
    return near[found // len(table)], (found % len(table)).astype(np.int8)


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
