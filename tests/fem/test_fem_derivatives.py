"""Taylor tests, dot tests and second derivatives of objectives of finite elements."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_cases import box_of, mixed_up

import mpigrad as mg
from mpigrad import fem


def total(comm, x):
    return float(comm.mpi.allreduce(float(x)))


def problem(comm, alone):
    """A nonlinear equation with parameters of all kinds, observed at points.

    Returns (parameters of this rank, parameters of all ranks, this rank's share of the loss, mesh).
    """
    mesh = fem.distribute_mesh(**mixed_up("triangle", alone), partition="coordinates", comm=comm)
    space, other = fem.Space(mesh), fem.Space(mesh, 2)

    def law(p, k, bias, network, source):
        hidden = jnp.tanh(network["w"] * p.u + network["b"])
        return k * (1 + bias) * (0.5 * p.grad @ p.grad) + hidden @ hidden - source.u * p.u

    body = fem.Energy(space, law)
    robin = fem.Energy(space, lambda p, h, q: h * p.u**2 + q * p.u, on=mesh.facets("inlet"))
    fixed = space.fixed(lambda x: x[:, 0] == 2.0)
    observe = fem.Observation(space, [[0.31, 0.42], [1.1, 0.7], [1.6, 0.2]])
    n_facets = mesh.facets("inlet").n_local
    mine = {
        "k": 1 + 0.3 * jnp.cos(jnp.asarray(mesh.cell_ids, float)),
        "bias": 0.2 * jnp.sin(jnp.asarray(body.points.sum(axis=2))),
        "source": jnp.asarray(other.interpolate(lambda x: np.sin(x[:, 0] + x[:, 1]))),
        "values": jnp.asarray(space.interpolate(lambda x: 0.3 * x[:, 1])),
        "q": jnp.full(n_facets, 0.4),
    }
    network = {"w": jnp.array([0.5, -1.0]), "b": jnp.array([0.2, 0.1])}

    def loss(mine, shared):
        equation = body(
            fem.PerCell(mine["k"]),
            fem.PerPoint(mine["bias"]),
            shared["network"],
            source=fem.Nodal(other, mine["source"]),
        )
        equation = equation + robin(shared["h"], fem.PerCell(mine["q"]))
        assert not equation.is_linear
        u = fem.solve(equation, fixed, mine["values"], rtol=1e-12).value
        return jnp.sum((observe.local(u) - 0.1) ** 2)

    return mine, {"network": network, "h": jnp.asarray(0.7)}, loss, mesh


@functools.cache
def compiled(comm, alone):
    """The parameters, the program of the loss and its gradient in all of them, and the mesh."""
    mine, shared, loss, mesh = problem(comm, alone)
    return mine, shared, mg.jit(mg.value_and_grad(loss, (0, 1), replicated=1, comm=comm)), mesh


def inner(a, b):
    return sum(float(jnp.vdot(x, y)) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.long("Newton's method with all kinds of parameters; others have dot tests")
@pytest.mark.ranks(2)
def test_taylor_tests_in_all_parameters(comm, alone):
    """By the program of the gradient alone, which takes long to compile."""
    *x, program, _ = compiled(comm, alone)
    value, gradients = program(*x)
    for k in (0, 1):  # parameters of each rank, and of all ranks
        generator = np.random.default_rng([k, comm.rank * (k == 0)])
        v = jax.tree.map(lambda a, g=generator: g.normal(size=jnp.shape(a)), x[k])
        slope = inner(gradients[k], v)
        slope = total(comm, slope) if k == 0 else slope
        steps = 1e-3 * 0.5 ** np.arange(2)
        moved = [jax.tree.map(lambda a, d, h=h: a + h * d, x[k], v) for h in steps]
        values = [float(program(*[y if i == k else x[i] for i in (0, 1)])[0]) for y in moved]
        changes = np.array(values) - float(value)
        for remainders, order in ((changes, 1), (changes - steps * slope, 2)):
            assert abs(np.log2(abs(remainders[0] / remainders[1])) - order) < 0.2, remainders


@pytest.mark.ranks(2, 3, 4, 6)
def test_gradients_are_those_of_one_rank(comm, alone):
    """Whatever the division of the mesh, through Newton's method and values at points."""
    mine, shared, gradient, mesh = compiled(comm, alone)
    value, (by_mine, by_shared) = gradient(mine, shared)
    with alone:
        whole, shared, one, whole_mesh = compiled(alone, alone)
        expected, (whole_mine, whole_shared) = one(whole, shared)
    np.testing.assert_allclose(value, expected, rtol=1e-9)
    order = np.argsort(whole_mesh.cell_ids)  # that of the file
    for name in ("k", "bias"):
        np.testing.assert_allclose(
            by_mine[name], whole_mine[name][order][mesh.cell_ids], rtol=1e-7, atol=1e-13
        )
    order = np.argsort(whole_mesh.vertex_ids)
    np.testing.assert_allclose(
        by_mine["values"], whole_mine["values"][order][mesh.vertex_ids], rtol=1e-7, atol=1e-13
    )
    for name in ("source", "q"):
        squares = total(comm, jnp.sum(by_mine[name] ** 2)), float(jnp.sum(whole_mine[name] ** 2))
        np.testing.assert_allclose(*squares, rtol=1e-8)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12),
        by_shared,
        whole_shared,
    )


@pytest.mark.full("takes long to compile")
@pytest.mark.ranks(2)
def test_forward_mode_and_second_derivatives(comm, alone):
    """⟨w, H v⟩ = ⟨v, H w⟩, by forward over reverse, and against differences of gradients."""
    mine, shared, loss, _ = problem(comm, alone)
    x = {"h": shared["h"], "w": shared["network"]["w"]}

    def objective(x):
        both = {"h": x["h"], "network": {"w": x["w"], "b": shared["network"]["b"]}}
        return loss(mine, both)

    gradient = mg.grad(objective, replicated=0, comm=comm)
    v = {"h": jnp.asarray(0.3), "w": jnp.array([1.0, -0.5])}
    w = {"h": jnp.asarray(-0.2), "w": jnp.array([0.4, 0.9])}
    dot = lambda a, b: sum(jnp.vdot(a[k], b[k]) for k in a)
    product = mg.jit(lambda v: jax.jvp(gradient, (x,), (v,))[1])
    left, right = float(dot(w, product(v))), float(dot(v, product(w)))
    np.testing.assert_allclose(left, right, rtol=1e-8)
    h = 1e-4
    ends = [mg.jit(gradient)(jax.tree.map(lambda a, d, s=s: a + s * d, x, v)) for s in (h, -h)]
    np.testing.assert_allclose(left, float(dot(w, ends[0]) - dot(w, ends[1])) / (2 * h), rtol=1e-5)
    slope = total(comm, mg.jit(lambda v: jax.jvp(objective, (x,), (v,))[1])(v))
    np.testing.assert_allclose(slope, float(dot(mg.jit(gradient)(x), v)), rtol=1e-8)


@pytest.mark.thin(2)
@pytest.mark.parametrize("cells", ["equal", "different"])
def test_dot_tests_of_assembly(cells, comm, alone):
    """Residuals and element matrices in parameters and fields, over the product of ranks."""
    mesh = (
        box_of("hexahedron", comm)
        if cells == "equal"
        else fem.distribute_mesh(
            **mixed_up("hexahedron", alone), partition="coordinates", comm=comm
        )
    )
    space = fem.Space(mesh)
    form = fem.Energy(space, lambda p, k: k * (p.grad @ p.grad + 1) ** 1.5 - p.u**3)
    k = 1 + 0.2 * jnp.cos(jnp.asarray(mesh.cell_ids, float))
    u = jnp.asarray(space.interpolate(lambda x: np.sin(x.sum(axis=1))))

    def parts(k, u):
        equation = form(fem.PerCell(k))
        both = equation.residual(u), equation.jacobian(u) @ jnp.cos(u)
        return both if cells == "equal" else (*both, equation.lumped(u))

    mg.dot_test(parts, k, u, comm=comm)
    if cells == "equal":  # the tables have the Jacobians; no derivatives of their own
        return
    slope = mg.grad(lambda k, u: jnp.sum(form(fem.PerCell(k)).residual(u) ** 2), comm=comm)
    mg.dot_test(slope, k, u, comm=comm)
    twice = lambda k: (mg.vmap(lambda k: slope(k, u))(k), slope(k[0], u), slope(k[1], u))
    batch, *ones = mg.jit(twice)(jnp.stack([k, 2 * k]))
    np.testing.assert_allclose(batch, jnp.stack(ones), rtol=1e-12)
