"""Time steps of finite elements: orders, conserved energy, lumped masses, derivatives, misuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_cases import SHAPES, mixed_up

import mpigrad as mg
from mpigrad import fem, loops


def total(comm, x):
    return float(comm.mpi.allreduce(float(x)))


def rod(comm, n=8):
    """A rod with quadrilaterals of degree 2, mass 2 and stiffness 3, fixed at x = 0."""
    space = fem.Space(fem.box((n, 2), (1.0, 0.25), comm=comm), 2)
    mass = fem.Energy(space, lambda p: 0.5 * 2.0 * p.u**2)()
    stiffness = fem.Energy(space, lambda p, k: 0.5 * k * p.grad @ p.grad)
    return space, mass, stiffness, space.fixed("xmin")


def lowest_mode(space):
    """Its eigenvalue is 3/2 (π/2)²."""
    return jnp.asarray(space.interpolate(lambda x: np.sin(np.pi / 2 * x[:, 0])))


@pytest.mark.cases("0.5-2", reason="theta = 1 leaves out the term of the old time")
@pytest.mark.parametrize(("theta", "order"), [(0.5, 2), (1.0, 1)])
def test_order_of_the_theta_scheme(theta, order, comm):
    """A decaying mode, with a source that depends on the time: u = (e^-λt + sin t) mode."""
    space, mass, stiffness, fixed = rod(comm)
    mode, rate = lowest_mode(space), 1.5 * (np.pi / 2) ** 2
    source = fem.Energy(space, lambda p, mode, f: -f * mode.u * p.u)

    def equation(t):
        f = 2 * (jnp.cos(t) + rate * jnp.sin(t))
        return stiffness(3.0) + source(fem.Nodal(space, mode), f)

    @mg.jit
    def step(u, t, dt):
        return fem.theta_step(
            mass, equation(t + dt), u, dt, fixed, theta=theta, before=equation(t), rtol=1e-12
        ).value

    def error(steps):
        u, dt = mode, 0.5 / steps
        for i in range(steps):
            u = step(u, i * dt, dt)
        exact = (np.exp(-0.5 * rate) + np.sin(0.5)) * mode
        return np.sqrt(total(comm, jnp.sum((u - exact) ** 2)))

    coarse, fine = error(4), error(8)
    assert abs(np.log2(coarse / fine) - order) < 0.25


@pytest.mark.full("takes long; the example of fem.integrate runs, and tests/ode has the gradients")
@pytest.mark.long("adaptive steps with a nonlinear law, and their gradient")
def test_adaptive_steps(comm):
    """A decaying mode; then a nonlinear law, whose gradient is compared with differences."""
    space, mass, stiffness, fixed = rod(comm, 4)
    mode, rate = lowest_mode(space), 1.5 * (np.pi / 2) ** 2
    ts = np.array([0.0, 0.1, 0.2])
    end = fem.integrate(mass, stiffness(3.0), mode, ts, fixed=fixed, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(end.value[-1], np.exp(-0.2 * rate) * mode, atol=2e-3)

    law = fem.Energy(space, lambda p, k: 0.5 * k * (1 + p.u**2) * p.grad @ p.grad)

    def share(k, value):
        end = fem.integrate(
            mass, lambda t, k: law(k * (1 + t)), mode, ts, (k,), fixed, value, adaptive=False,
            dt0=0.05, rtol=1e-9, atol=1e-11, max_steps=8,
        )  # fmt: skip
        return jnp.sum(end.value[1:] ** 2)

    gradient = mg.jit(mg.value_and_grad(share, (0, 1), replicated=(0, 1), comm=comm))
    _, slopes = gradient(3.0, 0.2)
    h = 1e-4
    for slope, (dk, dv) in zip(slopes, ((h, 0.0), (0.0, h)), strict=True):
        more, less = (gradient(3.0 + s * dk, 0.2 + s * dv)[0] for s in (1, -1))
        np.testing.assert_allclose(slope, (more - less) / (2 * h), rtol=1e-6)


def test_newmark_has_order_two_with_and_without_damping(comm):
    """M u'' + c M u' + K u = 0 for one mode. A load of the damping moves the field at rest.

    Without damping and load the energy is conserved.
    """
    space, mass, stiffness, fixed = rod(comm)
    mode, square, string = lowest_mode(space), 1.5 * (np.pi / 2) ** 2, stiffness(3.0)

    def energy(state):
        share = mass.integral(state.velocity) + string.integral(state.displacement)
        return total(comm, share)

    def damping(c, load):
        return c * mass - load * mass.residual(mode)

    @mg.jit
    def begin(c, load):
        return fem.start_motion(
            mass, string, 0.2 * mode, 0.7 * mode, fixed, damping=damping(c, load), rtol=1e-12
        )

    @mg.jit
    def step(state, dt, c, load):
        return fem.newmark_step(
            mass, string, state, dt, fixed, damping=damping(c, load), rtol=1e-13
        )

    def error(steps, c, load):
        state = start = begin(c, load)
        for _ in range(steps):
            state = step(state, 1.0 / steps, c, load)
        if c == 0:
            assert abs(energy(state) / energy(start) - 1) < 1e-9
        w, rest = np.sqrt(square - c**2 / 4), load / square
        waves = (0.2 - rest) * np.cos(w) + (0.7 + (0.2 - rest) * c / 2) / w * np.sin(w)
        exact = rest + np.exp(-c / 2) * waves
        return np.sqrt(total(comm, jnp.sum((state.displacement - exact * mode) ** 2)))

    for c, load in ((0.8, 0.3), (0.0, 0.0)):
        assert abs(np.log2(error(4, c, load) / error(8, c, load)) - 2) < 0.2
    cubic = fem.Energy(space, lambda p: p.u**4)()
    with pytest.raises(ValueError, match="damping must be linear"):
        state = fem.Motion(mode, mode, mode)
        fem.newmark_step(mass, stiffness(3.0), state, 0.1, fixed, damping=cubic)


@pytest.mark.cases("1-triangle", "2-hexahedron", reason="row sums, and scaled diagonals")
@pytest.mark.parametrize("kind", ["triangle", "hexahedron"])
@pytest.mark.parametrize("degree", [1, 2])
def test_lumped_masses(kind, degree, comm, alone):
    """They are positive, have the mass of the body, and equal row sums for degree 1."""
    assert kind in SHAPES
    mesh = fem.distribute_mesh(**mixed_up(kind, alone), partition="coordinates", comm=comm)
    space = fem.Space(mesh, degree, components=2)
    mass = fem.Energy(space, lambda p: 0.5 * (1 + p.x[0]) * jnp.sum(p.u**2))()
    diagonal = mass.lumped()
    assert float(jnp.min(diagonal)) > 0
    weight = fem.Energy(space, lambda p: 1 + p.x[0])()
    expected = total(comm, weight.integral())
    for c in range(2):
        np.testing.assert_allclose(total(comm, jnp.sum(diagonal[:, c])), expected, rtol=1e-12)
    if degree == 1 and kind == "triangle":
        constant = fem.Energy(space, lambda p: 0.5 * jnp.sum(p.u**2))()
        rows = constant.residual(jnp.ones(space.shape))
        np.testing.assert_allclose(constant.lumped(), rows, rtol=1e-12)


def test_explicit_steps_with_lumped_masses(comm):
    space, mass, stiffness, fixed = rod(comm)
    mode, speed = lowest_mode(space), np.sqrt(1.5) * np.pi / 2
    dt, steps = 0.01, 50
    lumped = mass.lumped()

    def step(state, _):
        u, v = state
        v = jnp.where(fixed, 0, v - dt * stiffness(3.0).residual(u) / lumped)
        return (u + dt * v, v), None

    half = mode, 0.5 * dt * speed**2 * mode  # the velocity half a step before
    u = mg.jit(lambda s: loops.scan(step, s, steps)[0][0])(half)
    error = np.sqrt(total(comm, jnp.mean((u - np.cos(speed * dt * steps) * mode) ** 2)) / comm.size)
    assert error < 2e-3


def test_fields_add_to_the_residual(comm):
    """Forces at nodes: the sum of a load of one is the sum over the whole body."""
    space, mass, stiffness, _ = rod(comm)
    force = jnp.asarray(space.interpolate(lambda x: x[:, 0] + 1))
    u = lowest_mode(space)
    equation = 2 * (mass + force) - np.asarray(force) + stiffness(3.0)
    expected = 2 * mass.residual(u) + force + stiffness(3.0).residual(u)
    np.testing.assert_allclose(equation.residual(u), expected, rtol=1e-12)
    np.testing.assert_allclose((force + mass).residual(u), mass.residual(u) + force)
    np.testing.assert_allclose((np.asarray(force) - mass).residual(u), force - mass.residual(u))
    np.testing.assert_allclose(mg.grad(equation.integral)(u), expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(TypeError, match="must be a field of shape"):
        _ = mass + jnp.ones(3)
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = mass + "load"


@pytest.mark.full("takes long to compile")
@pytest.mark.ranks(2)
def test_derivatives_through_steps(comm):
    """A Taylor test in conductivities and the first field, and the same on motions."""
    space, mass, stiffness, fixed = rod(comm, 4)
    u = lowest_mode(space)
    k = 1 + 0.5 * jnp.cos(jnp.asarray(space.mesh.cell_ids, float))
    observe = fem.Observation(space, [[0.55, 0.1], [0.9, 0.2]])

    @mg.jit
    def heat(x):
        def step(u, _):
            equation = stiffness(fem.PerCell(x["k"]))
            return fem.theta_step(mass, equation, u, 0.1, fixed, rtol=1e-11).value, None

        end = loops.scan(step, x["u"], 3)[0]
        return jnp.sum(observe.local(end) ** 2)

    @mg.jit
    def motion(x):
        equation = stiffness(fem.PerCell(x["k"]))
        state = fem.start_motion(mass, equation, x["u"], fixed=fixed, rtol=1e-11)

        def step(state, _):
            state = fem.newmark_step(mass, equation, state, 0.1, fixed, rtol=1e-11)
            return state, None

        return jnp.sum(observe.local(loops.scan(step, state, 3)[0].displacement) ** 2)

    for loss in (heat, motion):
        mg.taylor_test(loss, {"k": k, "u": u}, comm=comm)


def test_misuse_of_steps(comm):
    space, mass, stiffness, fixed = rod(comm, 2)
    u = jnp.zeros(space.shape)
    with pytest.raises(ValueError, match="theta must be from 0 to 1, got 2"):
        fem.theta_step(mass, stiffness(1.0), u, 0.1, fixed, theta=2)
    with pytest.raises(ValueError, match="beta must be positive, got 0"):
        fem.newmark_step(mass, stiffness(1.0), fem.Motion(u, u, u), 0.1, fixed, beta=0)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"NaN|not finite"):
        jax.block_until_ready(fem.theta_step(mass, stiffness(1.0), u + jnp.nan, 0.1, fixed).value)
