"""Spaces: nodes, their numbers and coordinates, on any number of ranks and in any partition."""

import numpy as np
import pytest
from mesh_cases import LENGTHS, SHAPES, box_of, in_file_order, mixed_up

import mpigrad as mg
from mpigrad import fem
from mpigrad.fem.cells import reference_cell

COMM = mg.default_communicator()
KINDS = list(SHAPES)


def spaces(kind, alone, degree):
    """Spaces on the same mesh in several partitions."""
    arrays = mixed_up(kind, alone)
    scattered = np.random.default_rng(2).permutation(np.arange(len(arrays["cells"])) % COMM.size)
    for partition in ("metis", "coordinates", scattered):
        mesh = fem.distribute_mesh(**arrays, partition=partition)
        yield fem.Space(mesh, degree)


@pytest.mark.thin(3)
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_are_where_the_element_has_them(kind, degree, alone):
    """And each place has one node, which one rank owns."""
    for space in spaces(kind, alone, degree):
        mesh, nodes = space.mesh, space.nodes
        element = space.element
        # Kuhn's division of a box has nodes of degree 2 at all points of the refined lattice.
        assert nodes.n_global == np.prod([degree * n + 1 for n in SHAPES[kind]])
        assert space.cell_nodes.dtype == np.int32
        assert space.cell_nodes.shape == (mesh.n_cells, element.dim)
        values = reference_cell(kind).shape_values(element.points)
        places = np.einsum("qk,ckx->cqx", values, mesh.points[mesh.cells])
        np.testing.assert_allclose(space.node_points[space.cell_nodes], places, atol=1e-14)
        own = space.node_points[: nodes.n_local]
        everywhere = np.concatenate(mesh.comm.mpi.allgather(own))
        assert len(np.unique(everywhere.round(9), axis=0)) == nodes.n_global
        # All ghosts are nodes of this rank's cells, and so are all own vertices.
        used = np.unique(space.cell_nodes)
        assert set(range(nodes.n_local, len(space.node_points))) <= set(used.tolist())
        if degree == 1:
            assert nodes is mesh.vertices


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_on_facets(kind, degree, alone):
    for space in spaces(kind, alone, degree):
        mesh = space.mesh
        on_side = space.nodes_on(mesh.facets("inlet"))
        where = space.nodes_where(lambda x: np.abs(x[:, 0]) < 1e-9)
        assert np.array_equal(on_side, where)
        total = mesh.comm.mpi.allreduce(int(on_side.sum()))
        assert total == np.prod([degree * n + 1 for n in SHAPES[kind][1:]])
        boundary = space.nodes_on(mesh.boundary_facets())
        x = space.node_points[: space.nodes.n_local]
        ends = np.array(LENGTHS[mesh.dim])
        assert np.array_equal(boundary, ((x < 1e-9) | (x > ends - 1e-9)).any(axis=1))


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_scikit_fem(kind, comm, alone):
    skfem = pytest.importorskip("skfem")
    mesh = box_of(kind, alone)
    points = np.empty_like(mesh.points)
    points[mesh.vertex_ids] = mesh.points
    cells = mesh.vertex_ids[mesh.cells]
    names = {
        "triangle": (skfem.MeshTri, skfem.ElementTriP1, skfem.ElementTriP2),
        "quadrilateral": (skfem.MeshQuad, skfem.ElementQuad1, skfem.ElementQuad2),
        "tetrahedron": (skfem.MeshTet, skfem.ElementTetP1, skfem.ElementTetP2),
        "hexahedron": (skfem.MeshHex, skfem.ElementHex1, skfem.ElementHex2),
    }
    make, *elements = names[kind]
    order = reference_cell(kind).names.vtk_order
    if kind == "hexahedron":  # scikit-fem counts the corners in another way
        order = (0, 1, 2, 4, 3, 5, 6, 7)
    other = make(points.T.copy(), cells[:, order].T.copy())
    ours = box_of(kind, comm)
    assert ours.boundary_facets().n_global == len(other.boundary_facets())
    assert comm.mpi.allreduce(int(ours.facet_table.is_local.sum())) == other.facets.shape[1]
    for degree, element in enumerate(elements, 1):
        basis = skfem.CellBasis(other, element())
        assert fem.Space(ours, degree).nodes.n_global == basis.N


def test_fields_are_interpolated(comm, alone):
    mesh = box_of("triangle", comm)
    scalar, vector = fem.Space(mesh, 2), fem.Space(mesh, 2, components=2)
    n = scalar.nodes.n_local
    assert (scalar.shape, vector.shape) == ((n,), (n, 2))
    x = scalar.node_points[:n]
    assert np.array_equal(scalar.interpolate(lambda x: x[:, 1]), x[:, 1])
    assert np.array_equal(vector.interpolate(lambda x: x), x)
    assert np.array_equal(vector.interpolate(lambda x: (1.0, 2.0)), np.tile([1.0, 2.0], (n, 1)))
    assert np.array_equal(scalar.interpolate(lambda x: 3.0), np.full(n, 3.0))
    with pytest.raises(ValueError, match=r"must return the shape \(\d+, 2\)"):
        vector.interpolate(lambda x: x[:, 0])
    with pytest.raises(TypeError, match="one bool for each"):
        scalar.nodes_where(lambda x: x[:, 0])
    with pytest.raises(ValueError, match="expected facets of this space's mesh"):
        scalar.nodes_on(box_of("triangle", comm).boundary_facets())
    for wrong in ({"degree": 3}, {"degree": True}, {"components": 0}, {"components": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            fem.Space(mesh, **wrong)


def test_numbers_of_neighbours_are_near(comm):
    """The nodes of a cell have near numbers, so the matrix of one rank has a small bandwidth."""
    mesh = fem.box((24, 12, 1), (2.0, 1.0, 0.1))
    for degree, width in ((1, 4), (2, 16)):
        space = fem.Space(mesh, degree)
        own = np.where(space.cell_nodes < space.nodes.n_local, space.cell_nodes, -1)
        spread = own.max(axis=1) - np.where(own < 0, own.max(axis=1)[:, None], own).min(axis=1)
        # A layer of vertices across the longest axis of a block, and a part of the next one.
        layer = {1: 26, 2: 13, 3: 26, 4: 14}[comm.size]
        assert spread.max() <= width * layer


@pytest.mark.ranks(1, 2)
def test_vertices_of_a_file_are_renumbered(comm, alone):
    """The numbers of the file are at random, and those of a rank are near each other in a cell."""
    for kind, narrow in (("triangle", 12), ("hexahedron", 45)):
        mesh = fem.distribute_mesh(**mixed_up(kind, alone), comm=comm, partition="coordinates")
        own = (mesh.cells < mesh.vertices.n_local).all(axis=1)
        assert np.ptp(mesh.cells[own], axis=1).max() <= narrow


def test_the_order_of_a_file_is_kept(comm, alone):
    arrays = mixed_up("tetrahedron", alone)
    mesh = fem.distribute_mesh(**arrays, comm=comm)
    u = fem.Space(mesh).interpolate(lambda x: x[:, 0] + 2 * x[:, 2])
    expected = arrays["points"][:, 0] + 2 * arrays["points"][:, 2]
    assert np.array_equal(in_file_order(mesh, mesh.vertex_ids, u), expected)


@pytest.mark.parametrize("degree", [1, 2])
def test_values_at_vertices(degree, comm, alone):
    mesh = fem.distribute_mesh(**mixed_up("triangle", alone), partition="coordinates", comm=comm)
    space = fem.Space(mesh, degree)
    at_vertices = space.node_points[space.vertex_nodes]
    np.testing.assert_array_equal(at_vertices, mesh.points[: mesh.vertices.n_local])
