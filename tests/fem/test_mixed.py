"""Several fields in one equation: Stokes and Navier-Stokes flow with Taylor-Hood elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from solcx import SolCx

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

    @mg.jit
    def solution(viscosity):
        return fem.solve(
            equation, {"velocity": flow.walls}, {"velocity": profile}, {"pressure": 5.0},
            schur=flow.mass(fem.Nodal(flow.Q, viscosity)), solver=SOLVER, nullspace=NULL,
        ).value  # fmt: skip

    u = solution(one.values)
    close(u.velocity, profile, 1e-9)
    slope = -2 * flow.Q.interpolate(lambda x: x[:, 0])
    nodes = flow.Q.nodes.n_global
    close(u.pressure, slope - mg.allreduce(slope.sum()) / nodes, 1e-8)

    # The residual of an energy is its derivative, and the Jacobian is that of the residual.
    @mg.jit
    def derivatives(u, t):
        energy = flow.stokes(one)
        change, transposed = mg.jvp(energy.residual, (u,), (t,))[1], mg.vjp(energy.residual, u)[1]
        K = energy.jacobian()
        assert K.blocks[1][1] is None
        moved = K @ [v.reshape(-1) for v in t]
        slope, residual = mg.grad(energy.integral)(u), energy.residual(u)
        return [change, transposed(t)[0], moved], [slope, residual]

    t = flow.space.wrapped([jnp.sin(jnp.arange(v.size) + 1.0).reshape(v.shape) for v in u])
    products, residuals = derivatives(u, t)
    flat = [[v.reshape(-1) for v in each] for each in products]
    close(flat[1], flat[0], 1e-12)  # a symmetric Jacobian
    close(flat[2], flat[0], 1e-12)
    close(*[tuple(each) for each in residuals], 1e-12)


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

    def loss(re):
        solution = fem.solve(
            form(re), {"velocity": flow.walls}, {"velocity": lid}, solver=solver, nullspace=NULL,
            rtol=1e-11,
        )  # fmt: skip
        return jnp.sum(solution.value.velocity[:, 1] ** 2), solution.stats["num_steps"]

    loss_and_slope = mg.jit(mg.value_and_grad(loss, has_aux=True, replicated=0))
    (_, steps), slope = loss_and_slope(20.0)
    assert steps > 2
    h = 1e-2
    change = (loss_and_slope(20.0 + h)[0][0] - loss_and_slope(20.0 - h)[0][0]) / (2 * h)
    close(slope, change, 1e-6)


# ---- A jump of the viscosity at x = 1/2, and free slip: `SolCx` has the formula ----


class TwoViscosities:
    """A flow for any two viscosities, and its distance from the formula.

    Parameters
    ----------
    jumps
        True for a pressure that may jump at x = 1/2: one component for each half. False for a
        continuous one.
    """

    def __init__(self, comm, n, jumps, cell_type="triangle"):
        mesh = fem.box((n, n), (1.0, 1.0), cell_type=cell_type, comm=comm)
        self.V = fem.Space(mesh, 2, components=2)
        self.Q = fem.Space(mesh, components=1 + jumps)
        self.space = fem.Mixed(velocity=self.V, pressure=self.Q)
        sides = ("xmin", "xmax", "ymin", "ymax")
        slip = [self.V.fixed(side, component=k // 2) for k, side in enumerate(sides)]
        self.fixed = {"velocity": np.any(slip, axis=0)}
        self.nullspace = NULL
        if jumps:
            x = self.Q.node_points[: self.Q.nodes.n_local, 0]
            outside = np.stack([x > 0.5 + 1e-9, x < 0.5 - 1e-9], axis=1)
            self.fixed["pressure"] = outside
            self.nullspace = (np.zeros(self.V.shape), 1.0 * ~outside)
        right = mesh.points[mesh.cells].mean(axis=1)[:, 0] > 0.5
        self.halves = fem.PerCell(1.0 * np.stack([~right, right], axis=1))
        self.stokes = fem.Energy(self.space, _two_viscosities, degree=6)
        self.mass = fem.Energy(self.Q, lambda p, half, eta: 0.5 * _pressure(p, half) ** 2 / eta)
        self.apart = fem.Energy(
            self.V, lambda p, half, exact: half * jnp.sum((p.u - exact) ** 2), degree=8
        )
        self.unlike = fem.Energy(
            self.Q, lambda p, half, exact, k: (_pressure(p, half) - exact) ** k, degree=8
        )

    def solve(self, eta):
        eta = fem.PerCell(self.halves.values @ eta)
        return fem.solve(
            self.stokes(self.halves, eta), self.fixed, schur=self.mass(self.halves, eta),
            nullspace=self.nullspace,
            solver=MINRES(
                rtol=1e-9, max_steps=2000, preconditioner=BlockDiagonal(Jacobi(), Jacobi())
            ),
        ).value  # fmt: skip

    def errors(self, u, exact):
        """Return the L2 errors of the velocity in each half, and of the pressure."""
        velocity, pressure = fem.PerPoint(exact[..., :2]), exact[..., 2]
        squares = [
            self.apart(fem.PerCell(self.halves.values[:, k]), velocity).integral(u.velocity)
            for k in (0, 1)
        ]
        mean = self.unlike(self.halves, fem.PerPoint(pressure), 1).integral(u.pressure)
        shifted = fem.PerPoint(pressure + mg.allreduce(mean))
        squares.append(self.unlike(self.halves, shifted, 2).integral(u.pressure))
        return jnp.sqrt(mg.allreduce(jnp.stack(squares)))


def _pressure(p, half):
    return p.u @ half if jnp.ndim(p.u) else p.u


def _two_viscosities(p, half, eta):
    v = p.velocity
    strain = 0.5 * (v.grad + v.grad.T)
    force = jnp.sin(np.pi * p.x[1]) * jnp.cos(np.pi * p.x[0])
    return (
        eta * jnp.sum(strain**2) - _pressure(p.pressure, half) * jnp.trace(v.grad) - v.u[1] * force
    )


def test_gradients_in_two_viscosities(comm):
    """At a contrast of 10⁶ they are those of the program, and close to those of the formula."""
    flow = TwoViscosities(comm, 4, jumps=True)
    log_eta, shift = np.array([0.0, 6.0]), np.array([0.2, 0.3])
    nodes = flow.V.node_points[: flow.V.nodes.n_local]
    scale = np.where(nodes[:, :1] < 0.5, 10.0, 1e6) * (nodes[:, :1] != 0.5)
    exact = lambda log_eta: SolCx(10.0**log_eta)(nodes)[:, :2]
    data = exact(log_eta + shift)
    at_points = SolCx(10.0**log_eta)(flow.apart.points)

    def misfit(log_eta):
        u = flow.solve(10.0**log_eta)
        return jnp.sum((scale * (u.velocity - data)) ** 2), flow.errors(u, at_points)

    run = mg.jit(mg.value_and_grad(misfit, has_aux=True, replicated=0))

    def slopes(misfit, h=1e-3):
        steps = h * np.eye(2)
        return np.array([misfit(log_eta + e) - misfit(log_eta - e) for e in steps]) / (2 * h)

    (_, errors), slope = run(log_eta)
    assert (np.asarray(errors) < [1.4e-4, 1.8e-10, 5.6e-3]).all()
    np.testing.assert_allclose(slope, slopes(lambda x: run(x)[0][0]), rtol=1e-4)
    formula = slopes(lambda x: mg.allreduce(np.sum((scale * (exact(x) - data)) ** 2)))
    assert (np.abs(slope / formula - 1) < [0.06, 1e-3]).all()


@pytest.mark.full("test_poiseuille has exact fields; this one compiles five programs")
def test_orders_of_convergence(comm):
    """The orders are 3 and 2, if the pressure may jump where the viscosity does.

    A continuous pressure has order 1/2 there. The velocity has order 1 then: 1/2 of its derivatives
    and 1/2 by duality. At a high contrast only the velocity of the stiff half has this order.
    """

    def errors(n, jumps, contrasts, cell_type="triangle"):
        flow = TwoViscosities(comm, n, jumps, cell_type)
        run = mg.jit(lambda eta, exact: flow.errors(flow.solve(eta), exact))
        etas = [np.array([1.0, contrast]) for contrast in contrasts]
        return np.array([run(eta, SolCx(eta)(flow.apart.points)) for eta in etas])

    def rates(jumps, contrasts):
        coarse, fine = (errors(n, jumps, contrasts) for n in (8, 16))
        return np.log2(coarse / fine), fine

    orders, fine = rates(True, (1.0, 10.0, 1e6))
    assert (orders > [2.95, 2.95, 1.95]).all()
    assert (fine[-1] < [2.1e-6, 2.6e-12, 3.3e-4]).all()
    (one, *jumps), fine = rates(False, (1.0, 10.0, 1e6))
    assert (one > [2.95, 2.95, 1.95]).all()
    np.testing.assert_allclose(jumps, [[1.06, 1.20, 0.51], [3.03, 1.18, 0.52]], atol=0.05)
    assert (fine[-1] < [2.1e-6, 1.8e-10, 9.8e-3]).all()
    # The manual of ASPECT has 1.670009e-6 and 9.778441e-3 for these elements on 16² squares.
    left, right, pressure = errors(16, False, [1e6], "quadrilateral")[0]
    np.testing.assert_allclose([np.hypot(left, right), pressure], [1.670009e-6, 9.778441e-3], 3e-4)


def test_equal_degrees_with_a_stiffness(comm):
    """Two Laplacians in place of a biharmonic operator: a field without a block of its own."""
    mesh = fem.box((4, 4), (1.0, 1.0), comm=comm)
    space = fem.Space(mesh)
    both = fem.Mixed(w=space, u=space)
    energy = fem.Energy(both, lambda p: 0.5 * p.w.u**2 - p.w.grad @ p.u.grad + p.u.u)
    edge = np.any([space.fixed(side) for side in ("xmin", "xmax", "ymin", "ymax")], axis=0)
    solver = GMRES(rtol=1e-12, restart=60)
    poisson = fem.Energy(space, lambda p: 0.5 * p.grad @ p.grad - p.u)

    @mg.jit
    def solutions():
        u = fem.solve(energy(), {"u": edge, "w": edge}, solver=solver)
        return u.value.w, fem.solve(poisson(), edge, solver=solver).value

    close(*solutions(), 1e-8)


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
