"""Several fields in one equation: Stokes and Navier-Stokes flow with Taylor-Hood elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close
from mpigrad import fem
from mpigrad.sparse import GMRES, MINRES, BlockDiagonal, BlockTriangular, Jacobi

SOLVER = GMRES(rtol=1e-12, restart=90, preconditioner=BlockTriangular(Jacobi(), Jacobi()))
NULL = {"pressure": "constants"}


class Flow:
    def __init__(self, comm, n=3, degrees=(2, 1)):
        self.mesh = fem.box((n, n), (1.0, 1.0), cell_type="triangle", comm=comm)
        self.V = fem.Space(self.mesh, degrees[0], components=2)
        self.Q = fem.Space(self.mesh, degrees[1])
        self.space = fem.Mixed(velocity=self.V, pressure=self.Q)
        sides = [self.V.fixed(side) for side in ("xmin", "xmax", "ymin", "ymax")]
        self.walls = np.any(sides, axis=0)
        self.stokes = fem.Energy(self.space, _dissipation)
        self.mass = fem.Energy(self.Q, lambda p, eta: 0.5 * p.u**2 / eta.u)

    def field(self, function):
        return fem.Nodal(self.Q, jnp.asarray(self.Q.interpolate(function)))


def _dissipation(p, eta):
    v, q = p.velocity, p.pressure
    return 0.5 * eta.u * jnp.sum(v.grad**2) - q.u * jnp.trace(v.grad) - v.u[1] * jnp.sin(3 * p.x[0])


def test_poiseuille(comm):
    """A velocity of degree 2 and a pressure of degree 1 are found exactly, also by a weak form."""
    flow = Flow(comm)
    one = flow.field(lambda x: 1.0 + 0 * x[:, 0])
    profile = flow.V.interpolate(lambda x: np.stack([x[:, 1] * (1 - x[:, 1]), 0 * x[:, 0]], 1))
    form = fem.WeakForm(
        flow.space,
        lambda p: {
            "velocity": (None, p.velocity.grad - p.pressure.u * jnp.eye(2)),
            "pressure": (-jnp.trace(p.velocity.grad), None),
        },
    )
    equation = form()
    assert equation.is_linear
    assert not equation.symmetric
    solution = fem.solve(
        equation, {"velocity": flow.walls}, {"velocity": profile}, {"pressure": 5.0},
        schur=flow.mass(one), solver=SOLVER, nullspace=NULL,
    )  # fmt: skip
    u = solution.value
    close(u.velocity, profile, 1e-9)
    slope = -2 * flow.Q.interpolate(lambda x: x[:, 0])
    nodes = flow.Q.nodes.n_global
    close(u.pressure, slope - mg.allreduce(slope.sum()) / nodes, 1e-8)
    # The residual of an energy is its derivative, and the Jacobian that of the residual.
    energy = flow.stokes(one)
    t = flow.space.wrapped([jnp.ones_like(v) for v in u])
    _, change = mg.jvp(energy.residual, (u,), (t,))
    K = energy.jacobian()
    assert K.blocks[1][1] is None
    assert mg.dot_test(lambda *v: energy.residual(flow.space.wrapped(v)), *u).error < 1e-12
    moved = K @ [v.reshape(-1) for v in t]
    for a, b in zip(moved, change, strict=True):
        close(a, b.reshape(-1), 1e-12)
    slope = mg.grad(energy.integral)(u)
    for a, b in zip(slope, energy.residual(u), strict=True):
        close(a, b, 1e-12)


def test_gradient_in_the_viscosity(comm):
    flow = Flow(comm)
    solver = MINRES(rtol=1e-12, preconditioner=BlockDiagonal(Jacobi(), Jacobi()))
    fixed = flow.V.fixed("xmin") | flow.V.fixed("xmax") | flow.V.fixed("ymin", component=1)

    @mg.jit
    def loss(eta):
        nodal = fem.Nodal(flow.Q, eta)
        equation, schur = flow.stokes(nodal), flow.mass(nodal)
        u = fem.solve(equation, {"velocity": fixed}, schur=schur, solver=solver).value
        return 1e3 * jnp.sum(u.velocity**2) + jnp.sum(u.pressure**2)

    eta = flow.field(lambda x: 1 + x[:, 0] + x[:, 1] ** 2).values
    assert min(mg.taylor_test(loss, eta, step=1e-2, halvings=2).rates_with) > 1.9


def test_navier_stokes(comm):
    """Newton's method, and the derivative in the Reynolds number."""
    flow = Flow(comm, 2)
    form = fem.WeakForm(
        flow.space,
        lambda p, re: {
            "velocity": (
                re * p.velocity.grad @ p.velocity.u,
                p.velocity.grad - p.pressure.u * jnp.eye(2),
            ),
            "pressure": (-jnp.trace(p.velocity.grad), None),
        },
    )
    lid = flow.V.interpolate(
        lambda x: np.stack([4 * x[:, 0] * (1 - x[:, 0]) * (x[:, 1] > 0.99), 0 * x[:, 0]], 1)
    )
    assert not form(1.0).is_linear
    solver = GMRES(rtol=1e-12, restart=60)  # without a preconditioner

    @mg.jit
    def loss(re):
        solution = fem.solve(
            form(re), {"velocity": flow.walls}, {"velocity": lid}, solver=solver, nullspace=NULL,
            rtol=1e-11,
        )  # fmt: skip
        return jnp.sum(solution.value.velocity[:, 1] ** 2), solution.stats["num_steps"]

    (_, steps), slope = mg.value_and_grad(loss, has_aux=True, replicated=0)(20.0)
    assert steps > 2
    h = 1e-2
    change = mg.allreduce(loss(20.0 + h)[0] - loss(20.0 - h)[0]) / (2 * h)
    close(slope, change, 1e-6)


@pytest.mark.full("test_poiseuille has exact fields; this one has four sizes of meshes")
def test_orders_of_convergence(comm):
    """Order 3 of velocities, 2 or more of the pressure."""
    pi = np.pi

    def exact(x):
        s, t = jnp.sin(pi * x), jnp.sin(2 * pi * x)
        return pi * jnp.stack([s[0] ** 2 * t[1], -t[0] * s[1] ** 2])

    pressure = lambda x: jnp.cos(pi * x[0]) * jnp.sin(pi * x[1])

    def force(x):
        second = [jnp.trace(jax.hessian(lambda y, k=k: exact(y)[k])(x)) for k in (0, 1)]
        return jax.grad(pressure)(x) - jnp.stack(second)

    def energy(p):
        v = p.velocity
        return 0.5 * jnp.sum(v.grad**2) - p.pressure.u * jnp.trace(v.grad) - v.u @ force(p.x)

    errors = []
    for n in (4, 8, 16):
        flow = Flow(comm, n)
        u = fem.solve(
            fem.Energy(flow.space, energy, degree=6)(), {"velocity": flow.walls},
            schur=flow.mass(flow.field(lambda x: 1.0 + 0 * x[:, 0])), nullspace=NULL,
            solver=GMRES(rtol=1e-10, restart=300, preconditioner=SOLVER.preconditioner),
        ).value  # fmt: skip
        away = fem.Energy(flow.V, lambda p: jnp.sum((p.u - exact(p.x)) ** 2), degree=8)
        apart = fem.Energy(flow.Q, lambda p, m: (p.u - pressure(p.x) - m) ** 2, degree=8)
        mean = fem.Energy(flow.Q, lambda p: p.u - pressure(p.x), degree=8)().integral(u.pressure)
        squares = [away().integral(u.velocity), apart(mg.allreduce(mean)).integral(u.pressure)]
        errors.append(np.sqrt(mg.allreduce(jnp.stack(squares))))
    rates = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert (rates[-1] > [2.9, 1.9]).all()


def test_equal_degrees_with_a_stiffness(comm):
    """Two Laplacians in place of a biharmonic operator: a field without a block of its own."""
    mesh = fem.box((4, 4), (1.0, 1.0), comm=comm)
    space = fem.Space(mesh)
    both = fem.Mixed(w=space, u=space)
    energy = fem.Energy(both, lambda p: 0.5 * p.w.u**2 - p.w.grad @ p.u.grad + p.u.u)
    edge = np.any([space.fixed(side) for side in ("xmin", "xmax", "ymin", "ymax")], axis=0)
    solver = GMRES(rtol=1e-12, restart=60)
    u = fem.solve(energy(), {"u": edge, "w": edge}, solver=solver).value
    w = fem.solve(fem.Energy(space, lambda p: 0.5 * p.grad @ p.grad - p.u)(), edge, rtol=1e-10)
    close(u.w, w.value, 1e-8)


def test_errors_name_what_is_wrong(comm):
    flow, low = Flow(comm, 2), Flow(comm, 2, degrees=(1, 1))
    one = flow.field(lambda x: 1.0 + 0 * x[:, 0])
    stokes, schur, walls = flow.stokes(one), flow.mass(one), {"velocity": flow.walls}
    ones = fem.Nodal(low.Q, jnp.ones(low.Q.shape))

    def solve(equation=stokes, fixed=walls, **settings):
        return fem.solve(equation, fixed, solver=SOLVER, **{"schur": schur, **settings})

    for call, message in {
        lambda: solve(): 'a constant can be added to pressure.*nullspace={"pressure": "constants"}',
        lambda: solve(low.stokes(ones), {"velocity": low.walls}, schur=low.mass(ones)): (
            "pressure has degree 1 and appears without a block of its own.*Taylor-Hood"
        ),
        lambda: solve(fixed={"speed": flow.walls}): "a dictionary with the names velocity, press",
        lambda: solve(fixed={"velocity": flow.walls[:, 0]}): "fixed of velocity must be bools of",
        lambda: solve(values={"velocity": np.zeros(3)}): "values of velocity must be a number or",
        lambda: solve(schur=stokes): "schur must be an Equation of the last field, pressure",
        lambda: solve(nullspace={"pressure": 1}): "nullspace of pressure must be 'constants'",
        lambda: fem.solve(stokes, walls): "equations of several fields have no default solver",
        lambda: fem.Mixed(velocity=flow.V): "expected at least two spaces by name",
        lambda: fem.Mixed(x=flow.V, p=flow.Q): "a field cannot be called 'x'",
        lambda: fem.Mixed(v=flow.V, p=low.Q): "the spaces must be on one mesh",
        lambda: stokes.residual(jnp.ones(3)): "expected a field for each of velocity, pressure",
        lambda: fem.WeakForm(flow.space, lambda p: (None, None))().residual(flow.space.zeros()): (
            "the integrand must return a dictionary"
        ),
        lambda: stokes.lumped(): "expected an equation of one field, got the fields velocity, pr",
    }.items():
        with pytest.raises((TypeError, ValueError, jax.errors.JaxRuntimeError), match=message):
            call()
