"""Write meshes and fields as VTK unstructured grids: one piece for each rank, and an index."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.fem.cells import reference_cell
from mpigrad.fem.numbering import Numbering
from mpigrad.io import write_vtu

__all__ = ["Grid", "vtk_order", "write_grid"]

# The edges of VTK's cells in VTK's order of corners, and the type of the cell of degree 2.
_EDGES = {
    "triangle": ((0, 1), (1, 2), (2, 0)),
    "quadrilateral": ((0, 1), (1, 2), (2, 3), (3, 0)),
    "tetrahedron": ((0, 1), (1, 2), (2, 0), (0, 3), (1, 3), (2, 3)),
    "hexahedron": (
        *((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4)),
        *((0, 4), (1, 5), (2, 6), (3, 7)),
    ),
}
_QUADRATIC = {"triangle": 22, "quadrilateral": 28, "tetrahedron": 24, "hexahedron": 29}


@dataclass(frozen=True, eq=False)
class Grid:
    """Cells of this rank and their nodes, as a mesh or a space has them."""

    cell_type: str
    degree: int
    nodes: Numbering
    points: NDArray[np.float64]
    cells: NDArray[np.int32]

    @property
    def vtk_type(self) -> int:
        """The type of the cells in VTK."""
        names = reference_cell(self.cell_type).names
        return names.vtk if self.degree == 1 else _QUADRATIC[self.cell_type]


@functools.cache
def vtk_order(cell_type: str, degree: int) -> NDArray[np.intp]:
    """Return the node of basix at each place of VTK's cell of degree 1 or 2."""
    cell = reference_cell(cell_type)
    corners = cell.names.vtk_order
    order = list(corners)
    if degree == 1:
        return np.asarray(order)
    edges = [frozenset(edge) for edge in cell.entities[1].tolist()]
    for a, b in _EDGES[cell_type]:
        order.append(cell.n_corners + edges.index(frozenset((corners[a], corners[b]))))
    first = cell.n_corners + len(edges)
    if cell_type == "hexahedron":  # x = 0, x = 1, y = 0, y = 1, z = 0, z = 1
        centers = cell.points[cell.entities[2]].mean(axis=1)
        for axis in range(3):
            for end in (0.0, 1.0):
                order.append(first + int(np.flatnonzero(centers[:, axis] == end)[0]))
        first += len(centers)
    if not cell.is_simplex:
        order.append(first)
    return np.asarray(order)


def write_grid(
    function: str,
    path: str | os.PathLike[str],
    grid: Grid,
    *,
    points: Mapping[str, Any],
    cells: Mapping[str, Any],
    either: Mapping[str, Any] | None = None,
) -> None:
    """Write cells with fields of their nodes and of the cells (collective).

    Parameters
    ----------
    function
        The public function that errors name.
    path
        The index file, with the suffix `.pvtu`.
    grid
        The cells.
    points, cells
        Fields by name of own nodes and of cells.
    either
        Fields of nodes or of cells, whose shape says which.
    """
    by_shape = _sort_by_shape(function, grid, either or {})
    node_fields = {**points, **by_shape[0]}
    _check_nodes(function, grid, node_fields)
    # Only nodes of this rank's cells are in its piece.
    used, connectivity = np.unique(grid.cells, return_inverse=True)
    order = vtk_order(grid.cell_type, grid.degree)
    write_vtu(
        path,
        grid.points[used],
        connectivity.reshape(grid.cells.shape)[:, order],
        grid.vtk_type,
        point_fields={
            name: grid.nodes.append_ghosts(np.asarray(field))[used]
            for name, field in node_fields.items()
        },
        cell_fields={**cells, **by_shape[1]},
        comm=grid.nodes.comm,
        function=function,
    )


def _check_nodes(function: str, grid: Grid, fields: Mapping[str, Any]) -> None:
    """Raise an error on all ranks if a field does not have one row for each own node."""
    comm, rows = grid.nodes.comm, grid.nodes.n_local
    with raise_on_all_ranks(comm):
        for name, field in fields.items():
            shape, dtype = np.shape(field), np.asarray(field).dtype
            if dtype.kind not in "biuf":
                raise TypeError(
                    f"{function}: expected real numbers of 32 or 64 bits or bools, got dtype "
                    f"{dtype} for {name!r} on rank {comm.rank}. Convert the field."
                )
            if len(shape) not in (1, 2) or shape[0] != rows or 0 in shape[1:]:
                raise ValueError(
                    f"{function}: expected one row for each own node of rank {comm.rank}, {rows} "
                    f"in all, got shape {shape} for {name!r}. Give this rank's part of the field, "
                    "of shape (n,) or (n, components)."
                )
    kinds = [(str(name), str(np.asarray(f).dtype), np.shape(f)[1:]) for name, f in fields.items()]
    assert_same_on_all_ranks(comm, kinds, f"{function}: names, dtypes and components of fields")


def _sort_by_shape(
    function: str, grid: Grid, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of nodes and the fields of cells (collective)."""
    comm = grid.nodes.comm
    rows = [(np.shape(field) or (-1,))[0] for field in fields.values()]
    fits = [(n == grid.nodes.n_local, n == len(grid.cells)) for n in rows]
    ranks = comm.mpi.allgather(fits)
    points: dict[str, Any] = {}
    cells: dict[str, Any] = {}
    with raise_on_all_ranks(comm):
        for i, (name, field) in enumerate(fields.items()):
            at_points = all(len(rank) > i and rank[i][0] for rank in ranks)
            at_cells = all(len(rank) > i and rank[i][1] for rank in ranks)
            if at_points == at_cells:
                reason = "fits both" if at_points else "does not fit on all ranks"
                raise ValueError(
                    f"{function}: expected one row of {name!r} for each own node or for each cell, "
                    f"got shape {np.shape(field)} on rank {comm.rank}, which {reason}. Name the "
                    f"kind: points={{{name!r}: ...}} or cells={{{name!r}: ...}}."
                )
            (points if at_points else cells)[name] = field
    return points, cells
