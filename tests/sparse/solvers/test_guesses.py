"""Guesses from earlier solutions: fewer iterations, and the same solutions and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fields import Field, flux
from systems import grid_system

import mpigrad as mg
from helpers import close
from mpigrad import loops
from mpigrad.checkpoint import Checkpoint
from mpigrad.optimize import LBFGS, GaussNewton, minimize
from mpigrad.sparse import (
    GMRES,
    PCG,
    Guesses,
    Jacobi,
    Matrix,
    Result,
    hypre_available,
    pass_guesses,
    solve,
)

OWN = PCG(rtol=1e-12, max_steps=10_000, preconditioner=Jacobi())
SOLVERS = {"own": OWN} | (
    {"hypre": PCG(rtol=1e-12), "transposed": GMRES(rtol=1e-12)} if hypre_available() else {}
)
QUICK = SOLVERS.get("hypre", OWN)  # to compile
WEIGHTS = np.random.default_rng(11).standard_normal(30)
STEPS = 6


def stepping(system, solver, keep, drift=0.05):
    """Implicit steps x <- A(t)^-1 (x + b): this rank's share of a loss, and the solver's steps."""
    weights = jnp.asarray(WEIGHTS[system.mine])

    def f(values, b):
        def step(state, t):
            x, guesses = state
            A = Matrix(system.pattern, (1 + drift * t) * values)
            solution = solve(A, x + b, solver, x0=guesses)
            return (solution.value, solution.state), solution.stats["num_steps"]

        state = b, Guesses.empty(b, keep) if keep else None
        (x, _), steps = loops.scan(step, state, STEPS, jnp.arange(1.0 * STEPS))
        return jnp.sum(weights * x**2), steps

    return f


def symmetric_change(system):
    half = np.random.default_rng(2).standard_normal((30, 30))
    return jnp.asarray((half + half.T)[system.rows, system.columns][system.entries])


@pytest.mark.cases(
    list(SOLVERS)[-1], reason="the adjoint of GMRES has guesses and a matrix of its own"
)
@pytest.mark.parametrize("name", SOLVERS)
def test_derivatives_are_those_without_guesses(comm, name):
    """In a loop, with an empty rank: the adjoint solves go backwards through the steps."""
    system = grid_system(comm, empty=1 if comm.size > 2 else None)
    primals = system.values, system.b
    tangents = symmetric_change(system), jnp.asarray(WEIGHTS[system.mine])

    def derivatives(keep):
        f = stepping(system, SOLVERS[name], keep)
        gradient = mg.value_and_grad(f, (0, 1), has_aux=True)
        return mg.jit(lambda p, t: mg.jvp(gradient, p, t))(primals, tangents)

    ((value, _), g), ((slope, _), product) = derivatives(4)
    ((value_0, _), g_0), ((slope_0, _), product_0) = derivatives(0)
    close((value, slope, g), (value_0, slope_0, g_0), 1e-9)
    close(product, product_0, 1e-7)


@pytest.mark.full("derivatives with guesses are compared with those without guesses")
@pytest.mark.ranks(1, 2, 3)
def test_dot_and_taylor(comm):
    system = grid_system(comm)
    f = stepping(system, QUICK, 3)
    loss = mg.jit(lambda values, b: f(values, b)[0])
    assert mg.dot_test(loss, system.values, system.b).error < 1e-9
    mg.taylor_test(lambda b: loss(system.values, b), system.b)


@pytest.mark.ranks(2)
def test_fewer_iterations_forward_and_adjoint(comm, monkeypatch):
    from mpigrad.sparse.solvers import solve as module

    counts, forward = {3: [], 0: []}, {}
    system, run = grid_system(comm), module.jax_backend.run
    for keep, steps in counts.items():

        def counting(*args, steps=steps, **how):
            x, info = run(*args, **how)
            if how["site"] < 0:  # an adjoint
                jax.debug.callback(lambda n: steps.append(int(n)), info[0, 1])
            return x, info

        monkeypatch.setattr(module.jax_backend, "run", counting)
        f = stepping(system, PCG(rtol=1e-6, preconditioner=Jacobi()), keep, 0.0)
        _, forward[keep] = mg.jit(mg.grad(f, has_aux=True))(system.values, system.b)
        jax.block_until_ready(forward)
        jax.effects_barrier()
    for with_guesses, without in ((forward[3], forward[0]), (counts[3], counts[0])):
        assert len(with_guesses) == len(without) == STEPS
        assert with_guesses[0] == without[0]
        assert with_guesses[-1] <= 0.9 * without[-1]


@pytest.mark.ranks(2)
def test_activity_may_differ_between_ranks(comm):
    """No derivative is taken through the vectors, from which guesses are made or that are read."""
    system = grid_system(comm)
    last = comm.rank == comm.size - 1
    weights = jnp.asarray(WEIGHTS[system.mine])

    def f(theta, keep):
        b = theta if last else system.b
        guesses = Guesses(jnp.stack([b, 2 * b**2])) if keep else None
        total = 0.0
        for factor in (1.0, 1.5):
            solution = solve(Matrix(system.pattern, factor * system.values), b, QUICK, guesses)
            guesses = solution.state
            total += jnp.sum(weights * solution.value**2)
        return total + (0 * jnp.sum(guesses.vectors) if keep else 0)

    gradients = [mg.jit(mg.grad(lambda b, k=keep: f(b, k)))(system.b) for keep in (True, False)]
    close(gradients[0], gradients[1], 1e-9)


@pytest.mark.ranks(2)
def test_right_hand_sides_and_batches(comm):
    system = grid_system(comm)
    B = jnp.asarray(np.random.default_rng(1).standard_normal((30, 3))[system.mine])
    exact = solve(system.matrix, B, QUICK).value
    first = solve(system.matrix, B, QUICK, x0=Guesses.empty(B, keep=2))
    close(first.state.vectors, jnp.stack([first.value, 0 * B, B, 0 * B]))
    again = solve(system.matrix, B @ jnp.diag(jnp.array([2.0, 3.0, -1.0])), QUICK, x0=first.state)
    close(again.value, exact * jnp.array([2.0, 3.0, -1.0]), 1e-9)
    assert np.max(again.stats["num_steps"]) <= 1 < np.min(first.stats["num_steps"])

    def total(s, b, guesses):
        solution = solve(Matrix(system.pattern, s * system.values), b, QUICK, guesses)
        return jnp.sum(solve(system.matrix, b + solution.value, QUICK, solution.state).value ** 2)

    def batch(guesses):
        gradient = mg.vmap(mg.grad(lambda s, b: total(s, b, guesses)), in_axes=(0, 1))
        return mg.jit(gradient)(jnp.array([1.0, 2.0, 4.0]), B)

    close(batch(Guesses(B.T[:2])), batch(None), 1e-8)


@pytest.mark.ranks(2)
def test_functions_in_place_of_matrices(comm):
    """A pytree in a loop: a non-symmetric function, whose adjoint is its transpose."""
    field = Field(comm)
    b = {"u": jnp.sin(jnp.arange(20.0)).reshape(5, 4)[field.mine]}
    solver = GMRES(rtol=1e-12, preconditioner=None)

    def f(kappa, keep):
        def step(state, t):
            x, guesses = state
            A = lambda v: {"u": flux(field.pad(kappa), field.pad(v["u"]), 0.6 + 0.1 * t)}
            solution = solve(A, {"u": x["u"] + b["u"]}, solver, x0=guesses)
            return (solution.value, solution.state), solution.stats["num_steps"]

        state = b, Guesses.empty(b, keep) if keep else None
        (x, _), steps = loops.scan(step, state, 3, jnp.arange(3.0))
        return jnp.sum(x["u"] ** 3), steps

    kappa = 1 + 0.3 * jnp.cos(jnp.arange(20.0)).reshape(5, 4)[field.mine]

    gradient = mg.value_and_grad(f, has_aux=True)
    (value, steps), g = mg.jit(lambda k: gradient(k, 3))(kappa)
    (value_0, steps_0), g_0 = mg.jit(lambda k: gradient(k, 0))(kappa)
    close((value, g), (value_0, g_0), 1e-9)
    assert np.sum(steps) < np.sum(steps_0)


@pytest.mark.ranks(2)
def test_a_loop_of_gradients(comm):
    """`pass_guesses`: the gradient that is repeated needs no iterations, and has the same bits."""
    system = grid_system(comm)
    weights = jnp.asarray(WEIGHTS[system.mine])

    def loss(values, guesses, adjoint):
        solution = solve(Matrix(system.pattern, values), system.b, QUICK, x0=guesses)
        value = pass_guesses(jnp.sum(weights * solution.value**2), solution.state, adjoint)
        return value, (solution.state, solution.stats["num_steps"])

    def run():
        guesses = adjoint = Guesses.empty(system.b, 2)
        out = []
        for factor in (1.0, 1.1, 1.1):
            (value, (guesses, steps)), (g, adjoint) = program(
                factor * system.values, guesses, adjoint
            )
            out.append((value, steps, g, guesses, adjoint))
        return out

    program = mg.jit(mg.value_and_grad(loss, (0, 1), has_aux=True))
    first, second = run(), run()
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.array_equal(a, b)
    assert first[2][1] <= 1 < first[0][1]
    cotangent = 2 * weights * first[0][3].vectors[0]
    adjoint = solve(system.matrix, cotangent, QUICK).value
    close(first[0][4].vectors[::2], jnp.stack([adjoint, cotangent]), 1e-9)


def fitted(system, max_steps, method, guesses, checkpoint=None):
    target = jnp.sin(jnp.arange(30.0))[system.mine]

    def share(c, guesses=None):
        values = jnp.where(system.rows == system.columns, 4 + jnp.exp(c[0]), -jax.nn.sigmoid(c[1]))
        A = Matrix(system.pattern, jnp.asarray(values)[system.entries])
        solution = solve(A, system.b, QUICK, x0=guesses)
        out = solution.value - target
        out = out if method.residuals else jnp.sum(out**2)
        return out if guesses is None else (out, solution.state)

    start = np.array([0.5, -1.0])
    return minimize(
        share, start, method, replicated=True, max_steps=max_steps, guesses=guesses,
        checkpoint=checkpoint, rtol=1e-12,
    )  # fmt: skip


@pytest.mark.ranks(1, 2, 3)
def test_a_resumed_minimisation_has_the_same_bits(comm, tmp_path):
    directory = comm.mpi.bcast(tmp_path)
    system = grid_system(comm)
    guesses = Guesses.empty(system.b, 3)
    whole = fitted(system, 6, LBFGS(), guesses)
    checkpoint = Checkpoint(directory / "run", minutes=None, resume=True)
    fitted(system, 3, LBFGS(), guesses, checkpoint)
    resumed = fitted(system, 6, LBFGS(), guesses, checkpoint)
    assert resumed.stats["num_steps"] == whole.stats["num_steps"] == 6
    assert np.array_equal(resumed.value, whole.value)
    assert resumed.stats["loss"] == whole.stats["loss"]
    without = fitted(system, 6, LBFGS(), None)
    close(whole.value, without.value, 1e-6)
    assert not np.array_equal(whole.value, without.value)  # the guesses were used


@pytest.mark.ranks(2)
def test_second_order_methods(comm):
    system = grid_system(comm)
    ends = [fitted(system, 3, GaussNewton(), g) for g in (Guesses.empty(system.b), None)]
    close(ends[0].value, ends[1].value, 1e-6)


@pytest.mark.ranks(2)
def test_a_failed_solve_is_found_and_not_kept(comm):
    system = grid_system(comm)
    guesses = solve(system.matrix, jnp.ones_like(system.b), OWN, x0=Guesses.empty(system.b)).state
    impatient = PCG(rtol=1e-12, max_steps=2, preconditioner=Jacobi())
    solution = solve(system.matrix, system.b, impatient, x0=guesses, throw=False)
    assert solution.result == Result.MAX_STEPS_REACHED
    assert np.array_equal(solution.state.vectors, guesses.vectors)
    with pytest.raises(jax.errors.JaxRuntimeError, match="did not converge"):
        solve(system.matrix, system.b, impatient, x0=guesses)
    nan = Guesses(guesses.vectors.at[0, 0].set(jnp.nan if comm.rank == 1 else 1.0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="NaN or infinity"):
        solve(system.matrix, system.b, OWN, x0=nan)
    zero = solve(system.matrix, 0 * system.b, OWN, x0=guesses)
    assert not np.any(zero.value)


@pytest.mark.ranks(1)
def test_wrong_guesses_are_refused(comm):
    system = grid_system(comm)
    b = system.b
    for wrong in (jnp.zeros((2, 29)), jnp.zeros(30), jnp.zeros((2, 30), "float32"), {"u": b}):
        for A in (system.matrix, lambda v: 2 * v):
            with pytest.raises(ValueError, match=r"solve: the guesses in x0 must have vectors"):
                solve(A, b, GMRES(preconditioner=None), x0=Guesses(wrong))
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Guesses.empty(b, 0)
    guesses = Guesses.empty(b)
    with pytest.raises(TypeError, match="adjoint must have the structure of after"):
        pass_guesses(1.0, guesses, None)
    start = np.zeros(1)
    with pytest.raises(TypeError, match=r"f must return \(loss, guesses\)"):
        minimize(lambda x, g: jnp.sum(x), start, guesses=guesses)
    with pytest.raises(TypeError, match="f must return guesses like its argument"):
        minimize(lambda x, g: (jnp.sum(x), None), start, guesses=guesses)
    with pytest.raises(ValueError, match="got guesses with value_and_grad"):
        minimize(None, start, guesses=guesses, value_and_grad=lambda x: (0.0, x))
