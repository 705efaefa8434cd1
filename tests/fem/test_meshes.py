"""Meshes: the same mesh on any number of ranks, whatever the partition, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_cases import LENGTHS, SHAPES, assert_same_mesh, box_of, facets_in_file, mixed_up, whole

import mpigrad as mg
from mpigrad import fem
from mpigrad.fem.cells import reference_cell
from mpigrad.fem.piece import corner_jacobians

COMM = mg.default_communicator()
KINDS = list(SHAPES)


def partitions(n_cells):
    generator = np.random.default_rng(5)
    scattered = generator.permutation(np.arange(n_cells) % COMM.size)
    return {"metis": "metis", "coordinates": "coordinates", "scattered": scattered}


def distributed(arrays, comm, **options):
    """The mesh of arrays that only rank 0 has."""
    given = arrays if comm.rank == 0 else {}
    return fem.distribute_mesh(**given, comm=comm, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_box_is_the_same_on_any_number_of_ranks(kind, comm, alone):
    mesh = box_of(kind, comm)
    assert_same_mesh(mesh, box_of(kind, alone))
    shape = SHAPES[kind]
    assert mesh.vertices.n_global == np.prod([n + 1 for n in shape])
    # Vertices are numbered with x fastest.
    found = whole(mesh)
    ids = np.arange(mesh.vertices.n_global)
    for axis, n in enumerate(shape):
        h = LENGTHS[len(shape)][axis] / n
        np.testing.assert_allclose(found["points"][:, axis], h * (ids % (n + 1)), atol=1e-14)
        ids = ids // (n + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_volume_sides_and_euler_characteristic_of_a_box(kind, comm):
    mesh = box_of(kind, comm)
    reference = reference_cell(kind)
    volumes = corner_jacobians(mesh.points, mesh.cells, kind)[0].mean(axis=1)
    volumes /= {"triangle": 2, "tetrahedron": 6}.get(kind, 1)
    total = comm.mpi.allreduce(float(volumes.sum()))
    np.testing.assert_allclose(total, np.prod(LENGTHS[mesh.dim]))
    n_facets = comm.mpi.allreduce(int(mesh.facet_table.is_local.sum()))
    n_boundary = mesh.boundary_facets().n_global
    assert 2 * n_facets - n_boundary == mesh.n_cells_global * len(reference.facets)
    if reference.is_simplex:  # nodes of degree 2 are vertices and edges
        n_edges = fem.Space(mesh, 2).nodes.n_global - mesh.vertices.n_global
        faces = mesh.n_cells_global if mesh.dim == 2 else n_facets - mesh.n_cells_global
        assert mesh.vertices.n_global - n_edges + faces == 1
    sides = [mesh.facets(name) for name in mesh.facet_groups]
    assert sum(side.n_global for side in sides) == n_boundary
    for i, side in enumerate(sides):
        axis, end = divmod(i, 2)
        place = LENGTHS[mesh.dim][axis] if end else 0.0
        np.testing.assert_allclose(side.centers()[:, axis], place, atol=1e-14)
        where = lambda x, axis=axis, place=place: np.isclose(x[:, axis], place)
        assert np.array_equal(facets_in_file(mesh, side), facets_in_file(mesh, mesh.facets(where)))


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_is_the_same_whatever_the_partition(kind, comm, alone):
    arrays = mixed_up(kind, alone)
    one = fem.distribute_mesh(**arrays, comm=alone)
    n_cells = len(arrays["cells"])
    for name, partition in partitions(n_cells).items():
        mesh = distributed(arrays, comm, partition=partition)
        assert_same_mesh(mesh, one)
        assert mesh.n_cells > 0
        expected = {"scattered": "given"}.get(name, name)
        assert mesh.partition_method == expected
        report = mesh.partition_report()
        assert report.cells.sum() == n_cells
        assert report.vertices.sum() == len(arrays["points"])
        assert (report.n_cut > 0) == (comm.size > 1)
        assert f"partition by {expected}" in str(report)
    found = whole(one)
    assert np.array_equal(found["cells"], arrays["cells"])
    assert np.array_equal(found["points"], arrays["points"])
    assert one.facets(11).n_global == (arrays["facet_tags"] == 11).sum() == len(found["inlet"])
    assert len(found["interface"]) == (arrays["facet_tags"] == 12).sum() > 0
    assert one.cell_groups == {"left": 3, "5": 5}
    assert np.array_equal(one.cells_with("left"), one.cell_tags == 3)


@pytest.mark.parametrize("kind", ["quadrilateral", "hexahedron"])
def test_corners_in_the_order_of_vtk(kind, comm, alone):
    arrays = mixed_up(kind, alone)
    order = reference_cell(kind).names.vtk_order
    vtk = arrays | {"cells": arrays["cells"][:, order], "corner_order": "vtk"}
    assert_same_mesh(distributed(vtk, comm), fem.distribute_mesh(**arrays, comm=alone))


@pytest.mark.parametrize("kind", KINDS)
def test_inverted_cells_are_turned(kind, comm, alone):
    arrays = mixed_up(kind, alone)
    turned = arrays["cells"].copy()
    turned[::3] = turned[::3][:, reference_cell(kind).names.mirror]
    wrong = arrays | {"cells": turned}
    with pytest.raises(ValueError, match=r"inverted cell \d+ with the Jacobian"):
        distributed(wrong, comm)
    mesh = distributed(wrong, comm, reorient=True)
    assert (corner_jacobians(mesh.points, mesh.cells, kind)[0] > 0).all()
    assert mesh.boundary_facets().n_global == box_of(kind, alone).boundary_facets().n_global


def test_vertices_without_cells_are_dropped(comm, alone):
    arrays = mixed_up("triangle", alone)
    n = len(arrays["points"])
    more = arrays | {
        "points": np.insert(arrays["points"], 7, [[9.0, 9.0]], axis=0),
        "cells": arrays["cells"] + (arrays["cells"] >= 7),
        "facets": arrays["facets"] + (arrays["facets"] >= 7),
    }
    with pytest.raises(ValueError, match="got vertex 7 without cells"):
        distributed(more, comm)
    mesh = distributed(more, comm, drop_unused=True)
    assert mesh.vertices.n_global == n
    assert_same_mesh(mesh, fem.distribute_mesh(**arrays, comm=alone))


def test_values_travel_between_the_file_and_the_ranks(comm, alone):
    arrays = mixed_up("tetrahedron", alone)
    mesh = distributed(arrays, comm, partition="coordinates")
    root = comm.size - 1
    n_cells, n_vertices = mesh.n_cells_global, mesh.vertices.n_global
    x = np.random.default_rng(1).normal(size=(n_cells, 2))
    mine = x if comm.rank == root else np.zeros((0, 2))
    there = jax.jit(lambda x: mesh.scatter_cells(x, root))(mine)
    assert np.array_equal(there, x[mesh.cell_ids])
    back = mesh.gather_cells(there, root)
    assert np.array_equal(back, mine)
    assert mesh.scatter_cells(x, root).shape == (mesh.n_cells, 2)  # rows elsewhere are not read
    y = np.arange(n_vertices) if comm.rank == 0 else np.zeros(0, int)
    assert np.array_equal(mesh.scatter_vertices(y), mesh.vertex_ids)
    assert np.array_equal(mesh.gather_vertices(mesh.vertex_ids), y)
    mg.dot_test(lambda x: mesh.scatter_cells(x, root), jnp.asarray(mine))
    mg.dot_test(lambda x: mesh.gather_cells(x, root), there)
    mg.dot_test(mesh.gather_vertices, jnp.ones(mesh.vertices.n_local))

    def loss(x):
        return jnp.sum(mesh.scatter_cells(x, root) ** 3)

    value, gradient = mg.value_and_grad(loss)(jnp.asarray(mine))
    np.testing.assert_allclose(value, (x**3).sum(), rtol=1e-12)
    np.testing.assert_allclose(gradient, 3 * mine**2, rtol=1e-12)


@pytest.mark.thin(3)
def test_ghosts_are_read_and_added(comm, alone):
    arrays = mixed_up("hexahedron", alone)
    mesh = distributed(arrays, comm)
    vertices = mesh.vertices
    numbers = vertices.append_ghosts(np.arange(vertices.n_local) + vertices.offset)
    assert np.array_equal(numbers, vertices.numbers)
    assert np.array_equal(vertices.local_index(numbers), np.arange(len(numbers)))
    assert (np.diff(vertices.ghosts) > 0).all()
    assert not np.any(vertices.owners(vertices.ghosts) == comm.rank)
    assert np.array_equal(vertices.exchange.local_and_ghost(numbers[: vertices.n_local]), numbers)
    # The number of cells at each vertex, from all ranks.
    count = np.bincount(mesh.cells.ravel(), minlength=len(numbers))
    total = vertices.combine_at_owners(count, np.add)
    expected = np.bincount(arrays["cells"].ravel(), minlength=vertices.n_global)
    assert np.array_equal(total, expected[mesh.vertex_ids])


WRONG = {
    "different corners": ({"cells": [[0, 1, 1], [0, 2, 3]]}, "cell 0 must have 3 different"),
    "repeated": (
        {"cells": [[0, 1, 2], [0, 2, 3], [2, 0, 1]]},
        r"got the corners \[0, 1, 2\] in the cells 0 and 2 \(2 cells",
    ),
    "degenerate": ({"points": [[0, 0], [1, 0], [2, 0], [0, 1]]}, "degenerate cell 0"),
    "outside": ({"cells": [[0, 1, 9], [0, 2, 3]]}, "vertices from 0 to 3, got 0 to 9"),
    "shape": ({"cells": [[0, 1, 2, 3]]}, r"integers of shape \(k, 3\)"),
    "floats": ({"cells": [[0, 1, 2.5]]}, "integers of shape"),
    "type": ({"cell_type": "prism"}, "one of triangle, quadrilateral, tetrahedron, hexahedron"),
    "points": ({"points": [[0, 0, 0, 0]]}, r"shape \(n, 2\) on rank 0"),
    "surface": ({"points": [[0, 0, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]]}, "plane of constant z"),
    "nan": ({"points": [[0, 0], [1, 0], [1, np.nan], [0, 1]]}, "finite coordinates"),
    "tags": ({"cell_tags": [1]}, "cell_tags must be 2 integers"),
    "facet": ({"facets": [[1, 3]], "facet_tags": [1]}, r"facet of a cell, got corners \[1, 3\]"),
    "partition": ({"partition": "parmetis"}, "one of auto, metis, coordinates"),
    "parts": ({"partition": [0, 7]}, "ranks from 0 to"),
    "order": ({"corner_order": "abaqus"}, "'vtk' or 'basix'"),
}
SQUARE = {
    "points": [[0, 0], [1, 0], [1, 1], [0, 1]],
    "cells": [[0, 1, 2], [0, 2, 3]],
    "cell_type": "triangle",
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arrays_are_one_error_on_all_ranks(case, comm):
    changes, message = WRONG[case]
    given = SQUARE | changes if comm.rank == 0 else {}
    with pytest.raises(ValueError, match=message):
        fem.distribute_mesh(**given, comm=comm)
    assert fem.distribute_mesh(**SQUARE).n_cells_global == 2  # the ranks go on together


@pytest.mark.thin(3)
def test_more_ranks_than_cells(comm):
    if comm.size < 3:
        assert fem.distribute_mesh(**SQUARE).n_cells_global == 2
        return
    with pytest.raises(ValueError, match=f"one cell for each of the {comm.size} ranks, got 2"):
        fem.distribute_mesh(**SQUARE)
    with pytest.raises(ValueError, match=f"one brick for each of the {comm.size} ranks, got 2"):
        fem.box((2, 1), (1.0, 1.0))


def test_facets_on_three_cells(comm):
    # Three triangles on the edge from 0 to 1.
    points = [[0, 0], [1, 0], [0, 1], [0.5, 2], [0.5, -1]]
    cells = [[0, 1, 2], [0, 1, 3], [1, 0, 4]]
    if comm.size > 3:
        return
    mesh = fem.distribute_mesh(points, cells, "triangle", partition="coordinates")
    with pytest.raises(ValueError, match="lies on 3 cells"):
        mesh.boundary_facets()


@pytest.mark.ranks(1, 3)
def test_unknown_tags_and_masks(comm):
    mesh = box_of("quadrilateral", comm)
    with pytest.raises(ValueError, match="no facets of this mesh have the tag 'left'"):
        mesh.facets("left")
    with pytest.raises(ValueError, match="no facets of this mesh have the tag 9"):
        mesh.facets(9)
    with pytest.raises(
        ValueError, match=r"no cells of this mesh have the tag 1\. Its tags are: none"
    ):
        mesh.cells_with(1)
    mask = np.zeros(mesh.vertices.n_local + (comm.rank == 0), bool)
    with pytest.raises(TypeError, match=r"one bool for each of the \d+ vertices of rank 0"):
        mesh.facets(mask)
    with pytest.raises(TypeError, match="got dtype float64"):
        mesh.facets(lambda x: x[:, 0])
    with pytest.raises(ValueError, match="expected own numbers and ghosts, got 10000"):
        mesh.vertices.local_index([10000])
    with pytest.raises(ValueError, match="x must have"):
        mesh.gather_cells(np.zeros(mesh.n_cells + 1))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2.5, 2), (1, 1)), "shape must be integers"),
        (((2, 0), (1, 1)), "two or three positive integers"),
        (((2,), (1,)), "two or three positive integers"),
        (((2, 2), (1, -1)), "lengths must be 2 positive numbers"),
        (((2, 2), (1, 1), "hexahedron"), "cells with 2 dimensions"),
        (((2, 2), (1, 1), "square"), "cell_type to be one of"),
        (((2, 2), (1, 1), None, (0,)), "origin must be 2 finite"),
    ],
)
def test_wrong_boxes(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fem.box(*arguments)


def test_a_mask_chooses_facets(comm, alone):
    arrays = mixed_up("hexahedron", alone)
    mesh = distributed(arrays, comm)
    chosen = arrays["points"][:, 0] < 1e-9  # in the numbers of the file
    facets = mesh.facets(chosen[mesh.vertex_ids])
    assert np.array_equal(facets_in_file(mesh, facets), facets_in_file(mesh, mesh.facets("inlet")))
    assert facets.corners.shape == (facets.n_local, 4)
    np.testing.assert_allclose(facets.centers()[:, 0], 0, atol=1e-12)
