"""Number the nodes of elements of degree 2: vertices, and the middles of edges, faces and cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpigrad.fem.grouping import group_rows, row_groups
from mpigrad.fem.mesh import Mesh
from mpigrad.fem.numbering import Numbering
from mpigrad.fem.reference import reference_cell
from mpigrad.fem.route import Route

__all__ = ["Nodes", "make_nodes"]


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a space: their numbers, the nodes of each cell, and their coordinates."""

    nodes: Numbering
    cell_nodes: NDArray[np.int32]
    points: NDArray[np.float64]


@dataclass(frozen=True)
class _Entities:
    """The different edges, faces or interiors of this rank's cells.

    Attributes
    ----------
    keys
        The vertices with the three lowest local indices, shape (k, 3). For an edge the last one is
        -1.
    global_keys
        The vertices with the three lowest global numbers, in the same form. If this rank owns the
        first of them, they are the same vertices in the same order: this rank has no vertices of
        lower ranks there.
    of_cells
        The entities of each cell, shape (n_cells, entities of a cell).
    points
        Their middles, shape (k, dim).
    """

    keys: NDArray[np.int64]
    global_keys: NDArray[np.int64]
    of_cells: NDArray[np.intp]
    points: NDArray[np.float64]


def make_nodes(mesh: Mesh) -> Nodes:
    """Number the nodes of degree 2 (collective).

    An entity belongs to the owner of its vertex with the lowest global number. Any rank that has
    the entity knows this owner, and asks it for the number of the node. A rank numbers its nodes in
    the order of their first vertices, so neighbours in the mesh are neighbours in memory. The
    interior of a cell belongs to the rank of the cell.
    """
    comm, vertices = mesh.comm, mesh.vertices
    n_vertices, n_points = vertices.n_local, len(mesh.points)
    cell = reference_cell(mesh.cell_type)
    # Simplices have nodes on edges only, other cells on faces too, and one inside.
    corners = cell.entities[1:2] if cell.is_simplex else cell.entities[1:-1]
    numbers = vertices.numbers
    groups = [_entities(mesh, numbers, each) for each in corners]
    if not cell.is_simplex:
        groups.append(_interiors(mesh, numbers))
    keys = np.concatenate([group.keys for group in groups])
    global_keys = np.concatenate([group.global_keys for group in groups])
    points = np.concatenate([group.points for group in groups])
    kinds = np.repeat(np.arange(len(groups)), [len(group.keys) for group in groups])
    owners = vertices.owners(global_keys[:, 0])
    if not cell.is_simplex:
        owners[kinds == len(groups) - 1] = comm.rank

    # Ask the owners of entities on the boundary of this rank's part. An owner may not have the
    # entity itself: then it adds a node that none of its cells has.
    own, foreign = np.flatnonzero(owners == comm.rank), np.flatnonzero(owners != comm.rank)
    route = Route(comm, owners[foreign])
    asked = route.forward(np.column_stack([kinds, global_keys])[foreign])
    asked_points = route.forward(points[foreign])
    place = _find(vertices, kinds[own], keys[own], asked)
    missing = np.flatnonzero(place < 0)
    order, starts = group_rows(asked[missing] + 1, vertices.n_global + 1)
    extra = missing[order[starts[:-1]]]
    place[missing[order]] = len(own) + np.repeat(np.arange(len(extra)), np.diff(starts))

    # Own nodes are the vertices, the own entities and those of other ranks. They are numbered by
    # their first vertex, then by their second one.
    first = [np.arange(n_vertices), keys[own, 0], asked[extra, 1] - vertices.offset]
    second = [np.full(n_vertices, -1), keys[own, 1], np.full(len(extra), n_points)]
    by_key = np.argsort(
        np.concatenate(first) * (n_points + 2) + np.concatenate(second), kind="stable"
    )
    number = np.empty(len(by_key), np.int64)
    number[by_key] = np.arange(len(by_key)) + (int(comm.mpi.scan(len(by_key))) - len(by_key))
    answers = route.back(number[n_vertices + place])

    vertex_numbers = vertices.append_ghosts(number[:n_vertices])
    entity_numbers = np.empty(len(keys), np.int64)
    entity_numbers[own] = number[n_vertices : n_vertices + len(own)]
    entity_numbers[foreign] = answers
    ghosts = np.concatenate([vertex_numbers[n_vertices:], answers])
    nodes = Numbering(len(by_key), ghosts, comm)

    columns = [nodes.local_index(vertex_numbers)[mesh.cells]]
    index = nodes.local_index(entity_numbers)
    begin = 0
    for group in groups:
        columns.append(index[begin + group.of_cells])
        begin += len(group.keys)
    own_points = np.concatenate([mesh.points[:n_vertices], points[own], asked_points[extra]])
    return Nodes(nodes, np.concatenate(columns, axis=1), nodes.append_ghosts(own_points[by_key]))


def _entities(mesh: Mesh, numbers: NDArray[np.int64], corners: NDArray[np.intp]) -> _Entities:
    """Return the different entities of a kind, which have these corners in a cell."""
    rows = mesh.cells[:, corners].reshape(-1, corners.shape[1])
    rows = np.sort(rows, axis=1)
    # Three vertices of a quadrilateral say which one it is.
    order, starts = group_rows(rows[:, :3], max(len(mesh.points), 1))
    first = order[starts[:-1]]
    group_of = np.empty(len(rows), np.intp)
    group_of[order] = np.repeat(np.arange(len(first)), np.diff(starts))
    rows = rows[first]
    width = min(3, rows.shape[1])
    keys = np.full((2, len(first), 3), -1, np.int64)
    keys[0, :, :width] = rows[:, :width]
    keys[1, :, :width] = np.sort(numbers[rows], axis=1)[:, :width]
    of_cells = group_of.reshape(len(mesh.cells), -1)
    return _Entities(keys[0], keys[1], of_cells, _middles(mesh.points, rows))


def _interiors(mesh: Mesh, numbers: NDArray[np.int64]) -> _Entities:
    """Return the interiors of the cells, each of one cell only."""
    keys = np.sort(mesh.cells, axis=1)[:, :3].astype(np.int64)
    of_cells = np.arange(len(keys))[:, None]
    return _Entities(
        keys, np.sort(numbers[keys], axis=1), of_cells, _middles(mesh.points, mesh.cells)
    )


def _middles(points: NDArray[np.float64], rows: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the mean of 2, 4 or 8 points in each row.

    Halves are added first, so the mean of equal coordinates is equal to them.
    """
    corners = points[rows]
    while corners.shape[1] > 1:
        corners = 0.5 * (corners[:, ::2] + corners[:, 1::2])
    return corners[:, 0]


def _find(
    vertices: Numbering,
    kinds: NDArray[np.intp],
    keys: NDArray[np.int64],
    asked: NDArray[np.int64],
) -> NDArray[np.intp]:
    """Return the position of each entity that other ranks ask for among own ones, or -1.

    Parameters
    ----------
    kinds, keys
        The own entities, with the local indices of their vertices.
    asked
        Rows of a kind and three global numbers. This rank owns the first one.
    """
    place = np.full(len(asked), -1, np.intp)
    absent = asked[:, 1:] < 0  # the third vertex of an edge
    index, known = vertices.find(asked[:, 1:])
    rows = np.flatnonzero((known | absent).all(axis=1))
    wanted = np.where(absent, -1, index)[rows]
    # Only entities with the same first vertex can be among them.
    shared = np.zeros(vertices.n_local + vertices.n_ghosts, bool)
    shared[wanted[:, 0]] = True
    candidates = np.flatnonzero(shared[keys[:, 0]])
    table = np.column_stack([kinds[candidates], keys[candidates]])
    both = np.concatenate([table, np.column_stack([asked[rows, 0], wanted])]) + 1
    group, n_groups = row_groups(both, len(shared) + 3)
    candidate_of = np.full(n_groups, -1, np.intp)
    candidate_of[group[: len(table)]] = candidates
    place[rows] = candidate_of[group[len(table) :]]
    return place
