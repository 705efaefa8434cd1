"""diffrax, optimistix, equinox and optax around messages: the same as on one rank without any."""

import doctest
import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix
import pytest

import mpigrad as mg
from mpigrad import optimize, sparse
from mpigrad.grid import Grid, halo_exchange
from mpigrad.operations import norms

CELLS = 13  # on 2, 3 and 4 ranks the tiles are uneven


def close(got, expected, tolerance=1e-10):
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def neighbours(grid, boundary):
    """u -> the sum of each cell's neighbours; on one rank, without messages, if `grid` is None."""
    mode = {"mode": "edge"} if boundary == "edge" else {"constant_values": boundary}

    def total(u):
        p = jnp.pad(u, 1, **mode) if grid is None else halo_exchange(u, grid, 1, boundary)
        return p[2:] + p[:-2]

    return total


def on_root(comm, f, *args):
    """f(*args), which rank 0 compiles while the others compile the program with messages."""
    result = jax.device_get(jax.jit(f)(*args)) if comm.rank == 0 else None
    return comm.mpi.bcast(result)


# ---- norms ----


def parts(size):
    """A vector's parts of 3, 0, 2, ... entries, a pytree on each rank."""
    generator = np.random.default_rng(1)
    counts = [(3, 0, 2, 1)[r % 4] for r in range(size)]
    return [{"u": generator.normal(size=n), "v": generator.normal(size=(n, 2))} for n in counts]


@pytest.mark.parametrize("name", ["rms_norm", "max_norm"])
def test_norms_are_those_of_all_entries(comm, name):
    norm, reference = getattr(mg, name), getattr(optimistix, name)
    stack = parts(comm.size)
    mine, whole = jax.tree.map(jnp.asarray, stack[comm.rank]), [jax.tree.map(jnp.asarray, stack)]
    value, gradient = mg.jit(mg.value_and_grad(norm, loss="replicated", comm=comm))(mine)
    expected, of_whole = jax.value_and_grad(reference)(whole)
    close(value, expected, 1e-14)
    jax.tree.map(functools.partial(close, tolerance=1e-14), gradient, of_whole[0][comm.rank])
    mg.dot_test(norm, mine, comm=comm)


@pytest.mark.parametrize("norm", [mg.rms_norm, mg.max_norm])
def test_norms_keep_the_dtype_and_have_a_gradient_at_zero(comm, norm):
    x = jnp.full(3 - comm.rank % 2, 2.0)
    real = {"complex64": "float32", "complex128": "float64", "int32": "float64"}

    @mg.jit
    def all_norms(x):
        same = {kind: norm(x.astype(kind), comm) for kind in ("bfloat16", "float32", "float64")}
        others = {kind: norm(-x.astype(kind), comm) for kind in real}
        odd = [jnp.where(comm.rank == 0, special, x) for special in (jnp.nan, jnp.inf)]
        nothing = [norm([], comm), norm(jnp.zeros(0), comm)]
        gradients = [mg.grad(norm, comm=comm)(0 * x)]
        if norm is mg.rms_norm:  # some solvers begin with a value of infinity
            gradients.append(mg.grad(norm, comm=comm)(odd[1]))
        return same, others, [norm(special, comm) for special in odd], nothing, gradients

    same, others, (nan, infinite), nothing, gradients = all_norms(x)
    assert norm(jnp.full(2, 300.0, "float16"), comm) == 300  # the squares overflow float16
    for kind, value in (same | others).items():
        assert value.dtype == real.get(kind, kind)
        assert value == 2
    assert np.isnan(nan)
    assert np.isinf(infinite)
    assert not np.any(nothing)
    assert not any(np.any(gradient) for gradient in gradients)


def test_examples_of_docstrings(comm):
    failed, tried = doctest.testmod(norms)
    assert (failed, tried) == (0, 6)


# ---- diffrax ----


def integral(grid, adjoint, adaptive, norm):
    """(kappa, u) -> this rank's loss, and how the steps were; a nonlinear diffusion."""
    around = neighbours(grid, "edge")

    def rate(t, u, kappa):
        return kappa * (around(u) - 2 * u) + u - u**3

    constant = diffrax.ConstantStepSize()
    controller = diffrax.PIDController(1e-2, 1e-3, norm=norm) if adaptive else constant
    # The times of all steps are saved, too, if they are not known.
    times = diffrax.SubSaveAt(t1=not adaptive, steps=adaptive, fn=lambda t, y, args: t)

    def share(kappa, u):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(rate), diffrax.Heun() if adaptive else diffrax.Euler(), 0.0, 0.5,
            0.3 if adaptive else 0.1, u, kappa,
            saveat=diffrax.SaveAt(subs=[diffrax.SubSaveAt(t1=True), times]),
            stepsize_controller=controller, adjoint=adjoint, max_steps=16,
        )  # fmt: skip
        end, at = solution.ys
        names = ("num_accepted_steps", "num_rejected_steps")
        return jnp.sum(end[-1] ** 4), (at, [solution.stats[name] for name in names])

    return share


def fields():
    x = jnp.arange(CELLS) + 0.5
    return 3 + 0.1 * jnp.cos(x), jnp.sin(0.7 * x) + jnp.exp(-((x - 3) ** 2))


@pytest.mark.long("it compiles adaptive steps; libraries.md of test_docs is short")
@pytest.mark.cases(
    "RecursiveCheckpointAdjoint-True", reason="the default, with steps that the norm decides"
)
@pytest.mark.parametrize(
    ("adjoint", "adaptive"),
    [
        (diffrax.RecursiveCheckpointAdjoint(), True),
        (diffrax.RecursiveCheckpointAdjoint(), False),
        (diffrax.DirectAdjoint(), False),
        (diffrax.DirectAdjoint(), True),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, diffrax.AbstractAdjoint) else None,
)
def test_reverse_mode_of_diffrax(comm, adjoint, adaptive):
    grid = Grid((CELLS,), (1.0,), comm)
    share = integral(grid, adjoint, adaptive, functools.partial(mg.rms_norm, comm=comm))
    both = mg.jit(mg.value_and_grad(share, (0, 1), has_aux=True, comm=comm))
    (value, steps), gradients = both(*(x[grid.slices] for x in fields()))
    serial = integral(None, adjoint, adaptive, optimistix.rms_norm)
    (expected, of_serial), wholes = on_root(
        comm, jax.value_and_grad(serial, (0, 1), has_aux=True), *fields()
    )
    close(value, expected)
    for gradient, whole in zip(gradients, wholes, strict=True):
        close(gradient, whole[grid.slices])
    same_steps(comm, steps, of_serial, adaptive)


def same_steps(comm, steps, of_serial, adaptive):
    times, (accepted, rejected) = steps
    assert (accepted, rejected) == tuple(of_serial[1])
    assert (rejected > 0) == adaptive
    close(times[:accepted], of_serial[0][:accepted])
    bits = np.asarray(times).tobytes()
    assert all(other == bits for other in comm.mpi.allgather(bits))


@pytest.mark.full("test_divergent has the forward mode of while_loop, on which it is built")
def test_forward_mode_of_diffrax(comm):
    grid = Grid((CELLS,), (1.0,), comm)
    adjoint = diffrax.ForwardMode()
    share = integral(grid, adjoint, True, functools.partial(mg.rms_norm, comm=comm))
    own = tuple(x[grid.slices] for x in fields())
    along = mg.jit(lambda *x: mg.jvp(share, x, x, has_aux=True))
    value, slope, steps = along(*own)
    serial = integral(None, adjoint, True, optimistix.rms_norm)
    expected = on_root(comm, lambda *x: jax.jvp(serial, x, x, has_aux=True), *fields())
    close(mg.allreduce(value, comm=comm), expected[0])
    close(mg.allreduce(slope, comm=comm), expected[1])
    same_steps(comm, steps, expected[2], True)


@pytest.mark.full("it compiles long programs of diffrax")
def test_losses_of_one_rank(comm):
    """Of RecursiveCheckpointAdjoint each rank's loss depends on the solution; Direct need not."""
    grid = Grid((CELLS,), (1.0,), comm)
    kappa, u = (x[grid.slices] for x in fields())

    def gradient(adjoint, choose):
        loss = integral(grid, adjoint, False, None)
        return mg.jit(mg.grad(lambda k: choose(loss(k, u)[0]), comm=comm))(kappa)

    first = gradient(
        diffrax.RecursiveCheckpointAdjoint(), lambda loss: jnp.where(comm.rank == 0, loss, 0.0)
    )
    close(first, gradient(diffrax.DirectAdjoint(), lambda x: x if comm.rank == 0 else 0.0))
    assert np.any(first) or comm.rank > 1  # five steps reach five cells


@pytest.mark.full("test_reverse_mode_of_diffrax compares the gradient with that of one rank")
def test_taylor_of_diffrax(comm):
    grid = Grid((CELLS,), (1.0,), comm)
    kappa, u = (x[grid.slices] for x in fields())
    share = integral(grid, diffrax.RecursiveCheckpointAdjoint(), False, None)
    mg.taylor_test(lambda kappa: share(kappa, u)[0], kappa, comm=comm)


@pytest.mark.ranks(2, 3)  # on one rank a halo is no message
def test_adjoints_with_messages_in_their_rules_are_refused(comm):
    grid = Grid((CELLS,), (1.0,), comm)
    kappa, u = (x[grid.slices] for x in fields())

    def solve(kappa, **options):
        rate = lambda t, u, kappa: kappa * halo_exchange(u, grid, 1, 0.0)[2:] - u
        return jnp.sum(
            diffrax.diffeqsolve(
                diffrax.ODETerm(rate), diffrax.Euler(), 0.0, 1.0, 0.5, u, kappa, **options
            ).ys
        )

    for adjoint in (diffrax.BacksolveAdjoint(), diffrax.ImplicitAdjoint()):
        with pytest.raises(ValueError, match=r"no message in the \w+ rule of a jax.custom_"):
            mg.jit(mg.grad(functools.partial(solve, adjoint=adjoint), comm=comm))(kappa)


# ---- optimistix ----


def sweep(grid):
    """Return a sweep of Jacobi's method, whose fixed point is looked for."""
    around = neighbours(grid, 0.0)
    return lambda u, b: (around(u) + b - 0.1 * u**3) / 3


def fixed_point(grid, b, norm, adjoint):
    """Return the sum of cubes of the fixed point, the fixed point and the number of steps."""
    solver = optimistix.FixedPointIteration(1e-12, 1e-12, norm)
    solution = optimistix.fixed_point(sweep(grid), solver, jnp.zeros_like(b), b, adjoint=adjoint)
    return jnp.sum(solution.value**3), (solution.value, solution.stats["num_steps"])


def fixed_point_of_one_rank(comm):
    """Return the right-hand side, and ((value, (u, steps)), gradient) without messages."""
    x = jnp.arange(CELLS) + 0.5
    whole = jnp.cos(x) + 0.1 * x
    serial = lambda b: fixed_point(None, b, optimistix.rms_norm, optimistix.ImplicitAdjoint())
    return whole, on_root(comm, jax.value_and_grad(serial, has_aux=True), whole)


def test_fixed_points(comm):
    """Through the iterations."""
    grid = Grid((CELLS,), (1.0,), comm)
    norm = functools.partial(mg.rms_norm, comm=comm)
    adjoint = optimistix.RecursiveCheckpointAdjoint()
    share = lambda b: fixed_point(grid, b, norm, adjoint)
    whole, (expected, of_whole) = fixed_point_of_one_rank(comm)
    both = mg.jit(mg.value_and_grad(share, has_aux=True, comm=comm))
    (value, (u, steps)), gradient = both(whole[grid.slices])
    close(value, expected[0])
    close(u, expected[1][0][grid.slices])
    assert steps == expected[1][1]
    close(gradient, of_whole[grid.slices])


@pytest.mark.full("test_newton has gradients by the implicit function theorem")
def test_fixed_points_by_the_implicit_function_theorem(comm):
    grid = Grid((CELLS,), (1.0,), comm)
    whole, (expected, of_whole) = fixed_point_of_one_rank(comm)
    start = jnp.asarray(expected[1][0][grid.slices])

    def implicit(b, start):
        system = lambda u, b: u - sweep(grid)(u, b)
        return jnp.sum(sparse.newton(system, start, args=(b,), atol=1e-10, comm=comm).value ** 3)

    gradient = mg.jit(mg.grad(implicit, comm=comm))(whole[grid.slices], start)
    close(gradient, of_whole[grid.slices], 1e-8)


@pytest.mark.cases("OptaxMinimiser", reason="it goes the way of GradientDescent, with optax")
@pytest.mark.parametrize("method", ["GradientDescent", "OptaxMinimiser"])
def test_descent_on_sharded_unknowns(comm, method):
    """The function returns a rank's share: its gradient by plain JAX is that of the sum."""
    x = jnp.arange(CELLS) + 0.5
    whole = jnp.cos(x) + 0.1 * x

    def solve(grid, b, norm):
        around = neighbours(grid, 0.0)
        energy = lambda u, b: jnp.sum(u * (3 * u - around(u)) / 2 + u**4 / 40 - b * u)
        step = (optax.sgd(0.1),) if method == "OptaxMinimiser" else (0.1,)
        solver = getattr(optimistix, method)(*step, rtol=1e-5, atol=1e-5, norm=norm)
        adjoint = optimistix.RecursiveCheckpointAdjoint()
        u = optimistix.minimise(energy, solver, 0 * b, b, adjoint=adjoint).value
        return jnp.sum(u**3), u

    grid = Grid((CELLS,), (1.0,), comm)
    norm = functools.partial(mg.rms_norm, comm=comm)
    both = mg.jit(mg.value_and_grad(lambda b: solve(grid, b, norm), has_aux=True, comm=comm))
    (value, u), gradient = both(whole[grid.slices])
    serial = lambda b: solve(None, b, optimistix.rms_norm)
    expected, of_whole = on_root(comm, jax.value_and_grad(serial, has_aux=True), whole)
    # The share of the loss in the stopping test is another one: all of it is nearly converged.
    close(value, expected[0], 1e-4)
    close(u, expected[1][grid.slices], 1e-4)
    close(gradient, of_whole[grid.slices], 1e-3)


# ---- equinox and optax ----


def network(comm):
    """A module, its data, each rank's uneven share of them, and the loss."""
    model = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=(7, 2)))
    mine = inputs[comm.rank * 7 // comm.size : (comm.rank + 1) * 7 // comm.size]
    return model, inputs, mine, lambda model, x: jnp.sum((jax.vmap(model)(x) - x[:, 0]) ** 2)


@pytest.mark.cases("filter_jit", reason="test_operations has programs that mpigrad.jit compiles")
@pytest.mark.parametrize("jit", [mg.jit, eqx.filter_jit], ids=["mg.jit", "filter_jit"])
def test_modules_and_updates(comm, jit):
    model, inputs, mine, share = network(comm)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    method = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    def training(differentiate):
        def step(params, state, x):
            loss = lambda params: share(eqx.combine(params, static), x)
            value, gradient = differentiate(loss)(params)
            updates, state = method.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        return step

    parallel = training(functools.partial(mg.value_and_grad, replicated=0, comm=comm))
    serial = eqx.filter_jit(training(jax.value_and_grad))
    compiled = jit(parallel)
    now, state = params, method.init(params)
    then, state_then = params, method.init(params)
    for _ in range(3):
        now, state, value = compiled(now, state, mine)
        then, state_then, expected = serial(then, state_then, inputs)
        close(value, expected)
    jax.tree.map(close, now, then)
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(now)]
    assert all(other == bits for other in comm.mpi.allgather(bits))


def test_filter_grad_is_of_this_copy(comm):
    model, inputs, mine, share = network(comm)
    total = lambda model, x: mg.allreduce(share(model, x), comm=comm)
    gradient = mg.allreduce(eqx.filter_jit(eqx.filter_grad(share))(model, mine), comm=comm)
    twice = mg.allreduce(eqx.filter_jit(eqx.filter_grad(total))(model, mine), comm=comm)
    expected = eqx.filter_jit(eqx.filter_grad(share))(model, inputs)
    jax.tree.map(close, gradient, expected)
    jax.tree.map(lambda a, b: close(a, comm.size * b), twice, expected)
    close(eqx.filter_jit(total)(model, mine), share(model, inputs))


def test_clipping_of_sharded_gradients(comm):
    whole = np.random.default_rng(2).normal(size=(comm.size, 3))
    expected, _ = optax.clip_by_global_norm(1.0).update(whole, optax.EmptyState())
    clipped = optimize.clip_by_global_norm(
        jnp.asarray(whole[comm.rank]), 1.0, sharded=True, comm=comm
    )
    close(clipped, expected[comm.rank])
