"""Weak forms: orders of convergence, other libraries' matrices, one rank's numbers, derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_cases import SHAPES, mixed_up

import mpigrad as mg
from mpigrad import fem

KINDS = list(SHAPES)
ELEMENTS = [(kind, degree) for kind in KINDS for degree in (1, 2)]


def distributed(kind, alone, comm):
    return fem.distribute_mesh(**mixed_up(kind, alone), partition="coordinates", comm=comm)


def bent(mesh_arrays):
    """Move all vertices, so that no cell is affine."""
    points = mesh_arrays["points"]
    ends = points.max(axis=0)
    swing = np.prod(np.sin(2.1 * points / ends + 0.3), axis=1, keepdims=True)
    return mesh_arrays | {"points": points + 0.04 * ends * swing}


def total(comm, x):
    return float(comm.mpi.allreduce(float(x)))


def l2_error(kind, degree, n, comm):
    dim = 2 if kind in ("triangle", "quadrilateral") else 3
    mesh = fem.box((n,) * dim, (1.0,) * dim, cell_type=kind, comm=comm)
    space = fem.Space(mesh, degree)
    exact = lambda x: jnp.prod(jnp.sin(np.pi * x)) + x[0]
    source = lambda x: dim * np.pi**2 * jnp.prod(jnp.sin(np.pi * x))
    energy = fem.Energy(space, lambda p: 0.5 * p.grad @ p.grad - source(p.x) * p.u)
    fixed = space.fixed(mesh.boundary_facets())
    x = jnp.asarray(space.interpolate(lambda x: x[:, 0]))
    u = fem.solve(energy(), fixed, x, rtol=1e-10).value
    error = fem.Energy(space, lambda p: (p.u - exact(p.x)) ** 2, degree=2 * degree + 2)
    return np.sqrt(total(comm, error().integral(u)))


@pytest.mark.full("the matrices are those of scikit-fem, and solutions pass the patch test")
@pytest.mark.parametrize(("kind", "degree"), ELEMENTS)
def test_errors_fall_with_the_order_of_the_element(kind, degree, comm):
    coarse, fine = (l2_error(kind, degree, n, comm) for n in (4, 8))
    assert np.log2(coarse / fine) > degree + 0.75
    assert fine < (0.03 if degree == 1 else 0.001)


@pytest.mark.cases("hexahedron-1", reason="cells that are not affine take the longest path")
@pytest.mark.parametrize(("kind", "degree"), ELEMENTS)
def test_linear_fields_pass_the_patch_test(kind, degree, comm, alone):
    """Elasticity on bent cells, with a linear displacement on the boundary."""
    mesh = fem.distribute_mesh(**bent(mixed_up(kind, alone)), partition="coordinates", comm=comm)
    space = fem.Space(mesh, degree, components=mesh.dim)
    slope = 0.1 * np.arange(mesh.dim**2).reshape(mesh.dim, -1) - 0.3

    def density(p, shear):
        strain = 0.5 * (p.grad + p.grad.T)
        return shear * jnp.sum(strain**2) + 0.5 * jnp.trace(strain) ** 2

    exact = jnp.asarray(space.interpolate(lambda x: x @ slope.T + 0.2))
    fixed = space.fixed(mesh.boundary_facets())
    energy = fem.Energy(space, density)
    u = fem.solve(energy(1.3), fixed, exact, rtol=1e-12).value
    np.testing.assert_allclose(u, exact, atol=1e-9)


SKFEM = {
    ("triangle", 1): ("MeshTri", "ElementTriP1"),
    ("triangle", 2): ("MeshTri", "ElementTriP2"),
    ("quadrilateral", 1): ("MeshQuad", "ElementQuad1"),
    ("tetrahedron", 1): ("MeshTet", "ElementTetP1"),
    ("tetrahedron", 2): ("MeshTet", "ElementTetP2"),
    ("hexahedron", 1): ("MeshHex", "ElementHex1"),
}
# The corners of basix, in which x runs fastest, in the order of scikit-fem.
CORNERS = {"quadrilateral": [0, 1, 3, 2], "hexahedron": [0, 4, 2, 1, 6, 5, 3, 7]}


@pytest.mark.cases(
    "triangle-2", "tetrahedron-1", "hexahedron-1", reason="affine or not, and both degrees"
)
@pytest.mark.parametrize(("kind", "degree"), SKFEM)
def test_matrices_are_those_of_scikit_fem(kind, degree, comm, alone):
    skfem = pytest.importorskip("skfem")
    arrays = bent(mixed_up(kind, alone))
    mesh = fem.distribute_mesh(**arrays, partition="coordinates", comm=comm)
    space = fem.Space(mesh, degree)
    density = lambda p, k: 0.5 * k * p.grad @ p.grad + 0.5 * p.x[0] * p.u**2
    form = fem.Energy(space, density, degree=2 * degree + 2)
    k = fem.PerCell(jnp.asarray(np.cos(mesh.cell_ids) + 2))
    A = form(k).jacobian().to_scipy()
    points = comm.mpi.gather(space.node_points[: space.nodes.n_local])
    if comm.rank:
        return
    assert A is not None and points is not None
    mesh_name, element = SKFEM[kind, degree]
    cells = arrays["cells"][:, CORNERS.get(kind, range(arrays["cells"].shape[1]))]
    other = getattr(skfem, mesh_name)(arrays["points"].T.copy(), cells.T.copy())
    basis = skfem.Basis(other, getattr(skfem, element)(), intorder=2 * degree + 2)

    @skfem.BilinearForm
    def bilinear(u, v, w):
        return w.k * (u.grad * v.grad).sum(axis=0) + w.x[0] * u * v

    of_points = np.repeat(np.cos(np.arange(len(cells))) + 2, basis.X.shape[-1])
    B = bilinear.assemble(basis, k=of_points.reshape(len(cells), -1)).tocsr()
    ours, theirs = np.concatenate(points), basis.doflocs.T
    place = [int(np.argmin(((ours - x) ** 2).sum(axis=1))) for x in theirs]
    assert sorted(place) == list(range(len(ours)))
    assert abs(A[place][:, place] - B).max() < 1e-12 * abs(B).max()


def heat(space, facets):
    """A nonlinear equation with parameters of all kinds."""
    energy = fem.Energy(
        space,
        lambda p, k, s, old, theta: (
            0.5 * k * (1 + s * p.u**2) * p.grad @ p.grad
            + 0.5 * (p.u - old.u) ** 2
            + 0.1 * old.grad @ p.grad
            - jnp.tanh(theta["w"] @ p.x + theta["b"]) * p.u
        ),
    )
    inflow = fem.Energy(space, lambda p, q: -q * p.u * (p.x + p.normal)[0], on=facets)
    return energy, inflow


def heat_loss(space, facets, linear=False):
    energy, inflow = heat(space, facets)
    fixed = space.fixed(lambda x: x[:, 0] == 0)
    data = jnp.asarray(space.interpolate(lambda x: np.sin(3 * x[:, 0])))

    def loss(p):
        s = 0.0 if linear else p["s"]
        given = energy(fem.PerCell(p["k"]), fem.PerPoint(s * p["points"]),
                       fem.Nodal(space, p["old"]), theta=p["theta"])  # fmt: skip
        u = fem.solve(given + inflow(fem.PerCell(p["q"])), fixed, p["values"], rtol=1e-13).value
        return jnp.sum((u - data) ** 2)

    n, q = energy.points.shape[:2]
    x = jnp.asarray(energy.points[..., 0])
    parameters = {
        "k": jnp.asarray(1 + 0.1 * np.cos(space.mesh.cell_ids)),
        "s": jnp.asarray(0.3),
        "points": 1 + 0.1 * x.reshape(n, q),
        "old": jnp.asarray(space.interpolate(lambda x: x[:, 1] ** 2)),
        "theta": {"w": jnp.linspace(0.5, 1, space.mesh.dim), "b": jnp.asarray(0.1)},
        "q": jnp.asarray(facets.centers()[:, 1]),
        "values": jnp.asarray(space.interpolate(lambda x: x[:, 1])),
    }
    return loss, parameters


def check_slope(loss, parameters, gradient, directions, name, comm):
    """Compare a central difference of the loss in one kind of parameter with its gradient."""
    along = jax.tree.map(jnp.zeros_like, parameters) | {name: directions[name]}
    ends = [
        total(comm, loss(jax.tree.map(lambda p, d, h=h: p + h * d, parameters, along)))
        for h in (1e-4, -1e-4)
    ]
    measured = (ends[0] - ends[1]) / 2e-4
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(along), strict=True)
    slope = total(comm, sum(jnp.vdot(g, d) for g, d in pairs))
    assert abs(measured - slope) < 1e-6 * max(abs(slope), 1e-2), name


@pytest.mark.full("test_fem_derivatives.py has these gradients by Taylor tests and one rank's")
@pytest.mark.parametrize("linear", [pytest.param(False, id="newton"), pytest.param(True, id="one")])
@pytest.mark.parametrize(("kind", "degree"), [("triangle", 2), ("hexahedron", 1)])
def test_gradients_in_all_parameters(kind, degree, linear, comm, alone):
    """A Taylor test in each kind of parameter, and the gradient of one rank."""
    results = {}
    for ranks in (comm, alone):
        mesh = distributed(kind, alone, ranks)
        space = fem.Space(mesh, degree)
        facets = mesh.facets(lambda x: x[:, 1] == 0)
        loss, parameters = heat_loss(space, facets, linear)
        value, gradient = mg.jit(mg.value_and_grad(loss, comm=ranks))(parameters)
        results[ranks] = (
            float(value),
            mesh.gather_cells(gradient["k"]),
            ranks.mpi.allreduce(np.asarray(gradient["theta"]["w"])),
            ranks.mpi.allreduce(float(gradient["theta"]["b"])),
            ranks.mpi.allreduce(float(jnp.sum(gradient["q"] * parameters["q"]))),
            ranks.mpi.allreduce(float(jnp.sum(gradient["old"] * parameters["old"]))),
        )
        if ranks is comm:
            directions = jax.tree.map(lambda p: jnp.cos(1 + jnp.abs(p) * 7), parameters)
            directions["theta"] = {"w": jnp.ones(mesh.dim), "b": jnp.asarray(0.7)}
            directions["s"] = jnp.asarray(0.4)
            compiled = mg.jit(loss)
            for name in directions:
                if not (linear and name in ("s", "points")):
                    check_slope(compiled, parameters, gradient, directions, name, comm)
    for ours, serial in zip(results[comm], results[alone], strict=True):
        if comm.rank == 0:
            np.testing.assert_allclose(ours, serial, rtol=1e-8, atol=1e-10)
