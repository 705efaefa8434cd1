"""Meshes for the tests of `mpigrad.fem`, and a mesh of all ranks in the order of its file."""

from __future__ import annotations

import numpy as np
import pytest

from mpigrad import fem
from mpigrad.fem.cells import reference_cell

pytest.importorskip("basix", reason="of the extra fem")
SHAPES = {
    "triangle": (5, 4),
    "quadrilateral": (5, 4),
    "tetrahedron": (4, 3, 3),
    "hexahedron": (4, 3, 3),
}
LENGTHS = {2: (2.0, 1.0), 3: (2.0, 1.0, 1.5)}
# Rotations of the numbers of corners, which leave a cell as it is.
ROTATIONS = {
    "triangle": [(0, 1, 2), (1, 2, 0), (2, 0, 1)],
    "quadrilateral": [(0, 1, 2, 3), (1, 3, 0, 2), (3, 2, 1, 0)],
    "tetrahedron": [(0, 1, 2, 3), (1, 2, 0, 3), (1, 0, 3, 2), (3, 1, 0, 2)],
    "hexahedron": [
        (0, 1, 2, 3, 4, 5, 6, 7),
        (1, 3, 0, 2, 5, 7, 4, 6),
        (0, 2, 4, 6, 1, 3, 5, 7),
        (1, 5, 3, 7, 0, 4, 2, 6),
    ],
}


def box_of(cell_type, comm):
    shape = SHAPES[cell_type]
    return fem.box(shape, LENGTHS[len(shape)], cell_type=cell_type, comm=comm)


def mixed_up(cell_type, alone, seed=0):
    """Arrays of a box with vertices moved, all numbers mixed up and tags on cells and facets."""
    mesh = box_of(cell_type, alone)
    generator = np.random.default_rng(seed)
    points = np.empty_like(mesh.points)
    points[mesh.vertex_ids] = mesh.points
    cells = np.empty_like(mesh.cells)
    cells[mesh.cell_ids] = mesh.vertex_ids[mesh.cells]
    ends = np.array(LENGTHS[mesh.dim])
    inside = ((points > 1e-9) & (points < ends - 1e-9)).all(axis=1)
    step = ends / np.array(SHAPES[cell_type])
    points[inside] += 0.12 * step * generator.uniform(-1, 1, (inside.sum(), mesh.dim))

    number = generator.permutation(len(points))  # of each old vertex
    mixed = np.empty_like(points)
    mixed[number] = points
    cells = number[cells][generator.permutation(len(cells))]
    turns = np.array(ROTATIONS[cell_type])[
        generator.integers(len(ROTATIONS[cell_type]), size=len(cells))
    ]
    cells = np.take_along_axis(cells, turns, axis=1)

    middle = mixed[cells].mean(axis=1)
    cell_tags = np.where(middle[:, 0] < 1.0, 3, 5)
    # Tags of facets on one side, and between the cells with the tag 3 and those with the tag 5.
    table = reference_cell(cell_type).facets
    corners = cells[:, table].reshape(-1, table.shape[1])
    side = (np.abs(mixed[corners][..., 0]) < 1e-9).all(axis=1)
    keys = np.sort(corners, axis=1)
    _, group, count = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    of_facet = np.repeat(cell_tags, len(table))
    total = np.bincount(group, weights=of_facet)
    between = (count[group] == 2) & (total[group] == 8) & (of_facet == 3)
    facets = np.concatenate([corners[side], corners[between]])
    facets = np.stack([generator.permutation(row) for row in facets])
    facet_tags = np.repeat([11, 12], [side.sum(), between.sum()])
    return {
        "points": mixed,
        "cells": cells,
        "cell_type": cell_type,
        "cell_tags": cell_tags,
        "facets": facets,
        "facet_tags": facet_tags,
        "cell_groups": {"left": 3},
        "facet_groups": {"inlet": 11, "interface": 12},
        "corner_order": "basix",
    }


def facets_in_file(mesh, facets):
    """Rows of cell ids and local facets of all ranks, sorted."""
    rows = np.column_stack([mesh.cell_ids[facets.cells], facets.local_facets])
    rows = np.concatenate(mesh.comm.mpi.allgather(rows))
    return rows[np.lexsort(rows.T[::-1])]


def in_file_order(mesh, ids, rows):
    """Rows of all ranks by their numbers in the file."""
    ids = np.concatenate(mesh.comm.mpi.allgather(ids))
    rows = np.concatenate(mesh.comm.mpi.allgather(rows))
    assert np.array_equal(np.sort(ids), np.arange(len(ids)))
    return rows[np.argsort(ids)]


def whole(mesh):
    """The mesh of all ranks in the order of its file, on every rank."""
    n = mesh.vertices.n_local
    vertex_ids = mesh.vertices.append_ghosts(mesh.vertex_ids)
    found = {
        "points": in_file_order(mesh, mesh.vertex_ids, mesh.points[:n]),
        "cells": in_file_order(mesh, mesh.cell_ids, vertex_ids[mesh.cells]),
        "cell_tags": in_file_order(mesh, mesh.cell_ids, mesh.cell_tags),
        "boundary": facets_in_file(mesh, mesh.boundary_facets()),
        "all": facets_in_file(mesh, mesh.facets(lambda x: x[:, 0] > -1, inner=True)),
        "half": facets_in_file(mesh, mesh.facets(lambda x: x[:, 0] < 1.2, inner=True)),
        "groups": (mesh.cell_groups, mesh.facet_groups),
    }
    for name in mesh.facet_groups:
        found[name] = facets_in_file(mesh, mesh.facets(name))
    return found


def assert_same_mesh(mesh, other):
    one, two = whole(mesh), whole(other)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert np.array_equal(value, two[name]) if name != "groups" else value == two[name], name
