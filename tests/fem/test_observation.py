"""Point evaluation: exact for polynomials, the same on any number of ranks, differentiable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_cases import LENGTHS, SHAPES, mixed_up

import mpigrad as mg
from mpigrad import fem
from mpigrad.fem.observation import find_points

KINDS = list(SHAPES)


def made(kind, alone, comm, degree, components=1):
    arrays = mixed_up(kind, alone)
    mesh = fem.distribute_mesh(**arrays, partition="coordinates", comm=comm)
    return fem.Space(mesh, degree, components)


def places_in(dim, n=40):
    """Random points, and points on corners, edges and the boundary of the mesh."""
    ends = np.array(LENGTHS[dim])
    random = np.random.default_rng(3).uniform(0, 1, (n, dim)) * ends
    special = np.array([np.zeros(dim), ends, 0.5 * ends, ends * ([0.4] + [0.0] * (dim - 1))])
    return np.concatenate([random, special])


@pytest.mark.cases(
    "triangle-2", "hexahedron-1", reason="cells that are affine or not, and both degrees"
)
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_polynomials_are_exact(kind, degree, comm, alone):
    space = made(kind, alone, comm, degree)
    dim = space.mesh.dim
    places = places_in(dim)
    curved = degree == 2 and kind in ("triangle", "tetrahedron")
    function = lambda x: 1 + x[:, 0] - 2 * x[:, -1] + curved * x[:, 0] * x[:, 1]
    observe = fem.Observation(space, places)
    u = jnp.asarray(space.interpolate(function))
    np.testing.assert_allclose(observe(u), function(places), atol=1e-12)
    np.testing.assert_allclose(observe.local(u), function(places[observe.indices]), atol=1e-12)
    assert comm.mpi.allreduce(len(observe.indices)) == len(places)
    x = space.node_points
    vectors = made(kind, alone, comm, degree, dim)
    assert np.array_equal(vectors.node_points, x)
    found = fem.Observation(vectors, places)(jnp.asarray(vectors.interpolate(lambda x: x)))
    np.testing.assert_allclose(found, places, atol=1e-12)


@pytest.mark.ranks(2, 3)
@pytest.mark.thin(3)
def test_cells_and_values_are_those_of_one_rank(comm, alone):
    """Also between cells, whose points may be found on several ranks."""
    arrays = mixed_up("triangle", alone)
    corners = arrays["points"]
    places = np.concatenate([places_in(2), corners, corners[arrays["cells"]][:, :2].mean(axis=1)])
    space, one = made("triangle", alone, comm, 2), made("triangle", alone, alone, 2)
    observe, serial = fem.Observation(space, places), fem.Observation(one, places)
    cells = np.full(len(places), -1)
    cells[observe.indices] = space.mesh.cell_ids[observe.cells]
    assert np.array_equal(
        np.max(comm.mpi.allgather(cells), axis=0), one.mesh.cell_ids[serial.cells]
    )
    function = lambda x: np.sin(3 * x[:, 0]) * np.cos(2 * x[:, 1])
    u, v = (jnp.asarray(s.interpolate(function)) for s in (space, one))
    np.testing.assert_allclose(observe(u), serial(v), atol=1e-14)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.cases("triangle", reason="other cells have other tables only")
@pytest.mark.parametrize("kind", ["triangle", "hexahedron"])
def test_derivatives(kind, comm, alone):
    space = made(kind, alone, comm, 2, 2)
    observe = fem.Observation(space, places_in(space.mesh.dim))
    u = jnp.asarray(np.random.default_rng(comm.rank).normal(size=space.shape))
    mg.dot_test(observe.local, u)
    mg.dot_test(observe, u)
    data = jnp.ones((len(observe.indices), 2))
    mg.taylor_test(lambda u: jnp.sum((observe.local(u) - data) ** 3), u)
    loss = lambda u: jnp.sum(observe(u) ** 3)
    _, shared = mg.value_and_grad(lambda u: jnp.sum(observe.local(u) ** 3))(u)
    _, replicated = mg.value_and_grad(loss, loss="replicated")(u)
    np.testing.assert_allclose(shared, replicated, atol=1e-12)


@pytest.mark.ranks(2)
def test_a_rank_without_points_takes_part(comm, alone):
    space = made("quadrilateral", alone, comm, 1)
    observe = fem.Observation(space, [[0.01, 0.02]])
    assert len(observe.indices) in (0, 1)
    u = jnp.ones(space.shape)
    gradient = mg.jit(mg.grad(lambda u: jnp.sum(observe.local(u) ** 2)))(u)
    np.testing.assert_allclose(comm.mpi.allreduce(float(gradient.sum())), 2.0)
    batch = jax.vmap(observe)(jnp.stack([u, 2 * u]))
    np.testing.assert_allclose(batch, [[1.0], [2.0]])
    assert observe(u.astype(jnp.float32)).dtype == jnp.float32


@pytest.mark.ranks(1, 2)
def test_wrong_points(comm, alone):
    space = made("quadrilateral", alone, comm, 1)
    with pytest.raises(ValueError, match=r"got 2 points outside of it, the first of them \[-0.1"):
        fem.Observation(space, [[0.5, 0.5], [-0.1, 0.5], [0.5, 7.0]])
    with pytest.raises(ValueError, match=r"shape \(m, 2\), got shape \(1, 3\)"):
        fem.Observation(space, [[0.5, 0.5, 0.5]])
    with pytest.raises(ValueError, match="must be finite"):
        fem.Observation(space, [[0.5, np.nan]])
    if comm.size > 1:
        with pytest.raises(ValueError, match="checksum of points must be the same on all ranks"):
            fem.Observation(space, [[0.5, 0.1 * (1 + comm.rank)]])
    assert fem.Observation(space, np.zeros((0, 2)))(jnp.ones(space.shape)).shape == (0,)


@pytest.mark.ranks(1)
def test_search_in_bent_cells():
    """Against the map from the reference cell, in quadrilaterals that are far from rectangles."""
    corners = np.array([[0, 0], [2, 0.3], [0.2, 1], [1.1, 1.4], [3.0, 0.1], [3.5, 2.0]])
    cells = np.array([[0, 1, 2, 3], [1, 4, 3, 5]], np.int32)
    xi = np.random.default_rng(0).uniform(0.01, 0.99, (60, 2))
    x, y = xi.T
    shapes = np.stack([(1 - x) * (1 - y), x * (1 - y), (1 - x) * y, x * y], axis=1)
    which = np.arange(60) % 2
    places = np.einsum("nk,nkx->nx", shapes, corners[cells[which]])
    found = find_points(corners, cells, "quadrilateral", np.arange(2), places)
    assert np.array_equal(found.cells, which)
    np.testing.assert_allclose(found.coordinates, xi, atol=1e-10)
    assert (found.distances == 0).all()
    outside = find_points(corners, cells, "quadrilateral", np.arange(2), np.array([[0.0, 0.9]]))
    assert outside.cells[0] == -1 and np.isinf(outside.distances[0])


@pytest.mark.ranks(4)
def test_a_rank_without_own_vertices_takes_part(comm, alone):
    points = [[0, 0], [1, 0], [1, 1], [0, 1], [0.5, 0.5]]
    cells = [[0, 1, 4], [1, 2, 4], [2, 3, 4], [3, 0, 4]]
    mesh = fem.distribute_mesh(points, cells, "triangle", partition=[0, 1, 2, 3])
    assert mesh.vertices.n_local == [3, 1, 1, 0][comm.rank]
    assert mesh.boundary_facets().n_local == 1
    function = lambda x: x[:, 0] - 3 * x[:, 1]
    places = np.array([[0.5, 0.1], [0.9, 0.5], [0.5, 0.9], [0.1, 0.5]])
    for degree, n_nodes in ((1, 5), (2, 13)):
        space = fem.Space(mesh, degree)
        assert space.nodes.n_global == n_nodes
        observe = fem.Observation(space, places)
        assert observe.indices.tolist() == [comm.rank]
        u = jnp.asarray(space.interpolate(function))
        np.testing.assert_allclose(jax.jit(observe)(u), function(places), atol=1e-14)
        mg.dot_test(observe.local, u)
        mg.dot_test(observe, u)
        boundary = space.nodes_on(mesh.boundary_facets())
        assert comm.mpi.allreduce(int(boundary.sum())) == 4 * degree
    mg.dot_test(mesh.gather_vertices, jnp.ones(mesh.vertices.n_local))
    mg.dot_test(mesh.scatter_vertices, jnp.ones((5 * (comm.rank == 0), 2)))
    gathered = mesh.gather_vertices(mesh.vertex_ids)
    assert np.array_equal(gathered, np.arange(5 * (comm.rank == 0)))
