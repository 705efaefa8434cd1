"""The discrete heat equation: its orders, its derivatives, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm

import mpigrad
from mpigrad.loops import Budget
from mpigrad_apps.heat import Heat
from mpigrad_apps.heat.experiment import Experiment
from mpigrad_apps.heat.inverse import predict
from mpigrad_apps.poisson import unit_square
from mpigrad_apps.poisson.fields import (
    manufactured_solution,
    manufactured_source,
    quadratic,
)


def largest(comm, values):
    return max(comm.mpi.allgather(float(np.max(np.abs(values)))))


def error(comm, n, duration=0.02):
    """Error of the explicit scheme for u = exp(-t) x (1 - x) y (1 - y), at the stable limit."""
    grid = unit_square((n, 3 * n // 2), comm)
    x, y = (jnp.asarray(axis) for axis in grid.centers())
    kappa, shape = quadratic(x, y), manufactured_solution(x, y)
    out = manufactured_source(quadratic)(x, y)
    model = Heat(grid, duration, 1)
    step = float(model.largest_time_step(kappa))
    steps = int(np.ceil(duration / step))
    model = dataclasses.replace(model, dt=duration / steps, steps=steps)
    run = mpigrad.jit(lambda k: model.run(k, shape, lambda t: -jnp.exp(-t) * (shape + out))[0])
    return largest(comm, run(kappa) - np.exp(-duration) * shape)


INSULATED = pytest.param(
    "insulated", marks=pytest.mark.full("the other boundary has the same time steps")
)


@pytest.mark.full("the fine grid takes many time steps")
def test_second_order_in_space(comm):
    coarse, middle, fine = (error(comm, n) for n in (8, 16, 32))
    assert np.log2(coarse / middle) > 1.8
    assert np.log2(middle / fine) > 1.9
    assert fine < 5e-4


def problem(comm, **options):
    """A model of a few cells, its operands, and the whole grid's."""
    grid = unit_square((7, 6), comm)
    generator = np.random.default_rng(2)
    whole = (
        generator.uniform(0.5, 2, grid.shape),
        generator.normal(size=grid.shape),
        generator.normal(size=(9, *grid.shape)),
    )
    kappa, initial, source = (jnp.asarray(a[(..., *grid.slices)]) for a in whole)
    return Heat(grid, 2e-3, 8, **options), (kappa, initial, source)


@pytest.mark.thin(1)
@pytest.mark.parametrize("boundary", ["zero", INSULATED])
def test_orders_in_time(comm, alone, boundary):
    """Against the exact solution of the equations that are discrete in space alone."""
    model, (kappa, initial, _) = problem(alone, boundary=boundary)
    cells = model.grid.size
    short = dataclasses.replace(model, dt=1e-6, steps=1)
    each = jax.jit(jax.vmap(lambda u: short.run(kappa, u)[0]))
    columns = each(jnp.eye(cells).reshape(cells, 7, 6))
    operator = (np.asarray(columns).reshape(cells, cells).T - np.eye(cells)) / 1e-6
    exact = (expm(0.02 * operator) @ initial.ravel()).reshape(7, 6)
    grid = unit_square((7, 6), comm)
    mine = [jnp.asarray(np.asarray(a)[grid.slices]) for a in (kappa, initial)]

    def distance(theta, steps):
        made = Heat(grid, 0.02 / steps, steps, theta, boundary)
        return largest(comm, mpigrad.jit(lambda *a: made.run(*a)[0])(*mine) - exact[grid.slices])

    for theta, order in ((0.5, 2), (1.0, 1)):
        assert abs(np.log2(distance(theta, 8) / distance(theta, 16)) - order) < 0.2


def test_derivatives_of_the_explicit_scheme(comm, alone):
    """In kappa, the first u and the source; with checkpoints, as without."""
    model, operands = problem(comm, checkpoints=Budget(7))

    def gradients(model, operands):
        def share(kappa, initial, source):
            return jnp.sum(model.history(kappa, initial, source)[1:] ** 2) / 2

        share = mpigrad.jit(share)
        both = mpigrad.value_and_grad(share, argnums=(0, 1, 2), comm=model.grid.comm)
        return both(*operands), share

    (value, found), share = gradients(model, operands)
    if comm.size < 3:
        mpigrad.taylor_test(lambda x: share(*x), operands, comm=comm)
    (expected, slopes), _ = gradients(*problem(alone))
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for a, b in zip(found, slopes, strict=True):
        mine = np.asarray(b)[(..., *model.grid.slices)]
        np.testing.assert_allclose(a, mine, rtol=1e-12, atol=1e-12 * np.max(np.abs(b)))


@pytest.mark.full("the gradient of this scheme passes the Taylor test and is that of one rank")
def test_dot_of_the_explicit_scheme(comm):
    model, operands = problem(comm, checkpoints=Budget(7))
    mpigrad.dot_test(model.history, *operands)


def test_derivatives_of_the_implicit_scheme(comm):
    model, operands = problem(comm, theta=0.5, boundary="insulated", checkpoints=3)
    mpigrad.dot_test(model.history, *operands, rtol=1e-8)


@pytest.mark.thin(1)
def test_sources_of_all_kinds(comm):
    model, (kappa, initial, _) = problem(comm)
    last = dataclasses.replace(model, theta=0.25)
    values = [
        1.0,
        jnp.ones_like(kappa),
        jnp.ones((9, *kappa.shape)),
        lambda t: jnp.ones_like(kappa),
    ]
    found = [mpigrad.jit(lambda k, f=f: last.history(k, initial, f))(kappa) for f in values[:1]]
    found += [mpigrad.jit(lambda k, f=f: last.run(k, initial, f)[0])(kappa) for f in values[1:]]
    assert found[0].shape == (9, *kappa.shape)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0][-1], rtol=1e-12)


@pytest.mark.ranks(2)
def test_a_rank_without_thermometers_is_batched_and_differentiated(comm):
    """By JAX's own vmap and jvp: what it shows, nothing, goes into the allreduce of all."""
    model, (kappa, initial, _) = problem(comm)
    plan = Experiment(model, kappa, initial, lambda t: jnp.ones_like(kappa))
    places = np.array([1, 4]) if comm.rank == 0 else np.zeros(0, int)

    def total(kappa):
        return mpigrad.allreduce(jnp.sum(predict(plan, kappa, places)), comm=comm)

    step = 1e-4
    kappas = jnp.stack([kappa, kappa * (1 + step), kappa * (1 - step)])
    both = jax.jit(lambda k, ks: (jax.jvp(total, (k,), (k,)), jax.vmap(total)(ks)))
    (one, slope), batch = both(kappa, kappas)
    np.testing.assert_allclose(batch[0], one, rtol=1e-12)
    np.testing.assert_allclose(slope, (batch[1] - batch[2]) / (2 * step), rtol=1e-5)


def test_heat_stays_in_an_insulated_plate(comm):
    model, (kappa, initial, _) = problem(comm, boundary="insulated")
    history = np.asarray(mpigrad.jit(model.history)(kappa, initial))
    totals = comm.mpi.allreduce(history.sum(axis=(1, 2)))
    np.testing.assert_allclose(totals, totals[0], rtol=1e-12)


@pytest.mark.ranks(1, 2, 4)
def test_rejects_invalid_input_on_all_ranks(comm):
    model, (kappa, initial, source) = problem(comm)
    last = comm.rank == comm.size - 1  # alone with its mistake
    run = mpigrad.jit(lambda k, u: model.run(k, u)[0])

    def refused(message, *operands, error=jax.errors.JaxRuntimeError, run=run):
        with pytest.raises(error, match=message):
            run(*operands)

    for value in (np.nan, 0.0, -1.0, np.inf):
        wrong = kappa.at[0, 0].set(value if last else 1.0)
        refused("kappa must be positive and finite", wrong, initial)
    refused("initial u must be finite", kappa, initial.at[0, 0].set(np.nan if last else 0.0))
    stiff = kappa.at[1, 1].set(100.0 if last else 1.0)
    limit = float(mpigrad.jit(model.largest_time_step)(stiff))
    refused(rf"unstable .* largest stable time step is {limit:.3g}"[:-2], stiff, initial)
    at_limit = dataclasses.replace(model, dt=limit)
    assert np.all(np.isfinite(mpigrad.jit(lambda k, u: at_limit.run(k, u)[0])(stiff, initial)))
    lenient = mpigrad.jit(lambda k, u: model.run(k, u, throw=False)[0])
    assert np.all(np.isnan(lenient(stiff, initial)))

    refused(
        "kappa must have the shape of this rank's tile", kappa[:0], initial[:0], error=ValueError
    )
    history = model.history
    refused("the source must have shape", kappa, initial, source[1:], error=ValueError, run=history)
    for wrong, message in (
        ({"dt": -1.0}, "dt must be positive"),
        ({"dt": np.nan}, "dt must be positive"),
        ({"steps": -1}, "steps must be 0 or more"),
        ({"theta": 1.5}, "theta must be between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(model, **(wrong if last else {}))
    if comm.size > 1:
        with pytest.raises(ValueError, match="must be the same on all ranks"):
            dataclasses.replace(model, dt=1e-3 if last else 1e-4)


def test_largest_time_step_is_that_of_the_textbook(comm):
    grid = unit_square((8, 16), comm)
    step = mpigrad.jit(Heat(grid, 1.0, 1).largest_time_step)(jnp.full(grid.local_shape, 3.0))
    np.testing.assert_allclose(step, 1 / (2 * 3 * (8**2 + 16**2)), rtol=1e-12)
