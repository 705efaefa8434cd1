"""The loss and its gradient: Taylor, and the same at any number of ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad
from mpigrad_apps.poisson import Network, Settings, inverse_problem
from mpigrad_apps.poisson.inverse import best_constant

CELLS = (11, 10)


def first_parameters(problem):
    """Parameters away from any symmetry, the same for any number of ranks."""
    parameters = problem.parametrization.first(None, 3)
    leaves, structure = jax.tree.flatten(parameters)
    generator = np.random.default_rng(8)
    moved = [leaf + 0.1 * generator.normal(size=leaf.shape) for leaf in leaves]
    return jax.tree.unflatten(structure, moved)


def settings(**changes):
    return Settings(cells=CELLS, tolerance=1e-12, **changes)


@pytest.mark.cases("cells", reason="the gradient of a network is compared with that of one rank")
@pytest.mark.parametrize("kappa", ["network", "cells"])
def test_gradient_passes_the_taylor_test(comm, kappa):
    problem = inverse_problem(settings(kappa=kappa, smoothing=0.01), comm)
    parameters = first_parameters(problem)
    loss = mpigrad.jit(lambda p: problem.value_and_grad(p)[0])
    value, gradient = mpigrad.jit(problem.value_and_grad)(parameters)
    generator = np.random.default_rng(2)
    direction = jax.tree.map(lambda leaf: generator.normal(size=leaf.shape), parameters)
    slope = sum(
        float(np.sum(np.asarray(g) * d))
        for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    )
    steps = [2.0**-k * 0.02 for k in range(4)]
    with_slope, without = [], []
    for step in steps:
        moved = float(loss(jax.tree.map(lambda p, d, h=step: p + h * d, parameters, direction)))
        without.append(abs(moved - float(value)))
        with_slope.append(abs(moved - float(value) - step * slope))
    assert np.log2(with_slope[-2] / with_slope[-1]) == pytest.approx(2, abs=0.15)
    assert np.log2(without[-2] / without[-1]) == pytest.approx(1, abs=0.15)


@pytest.mark.cases("absolute", reason="a network and most of the options")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kappa": "network"}, id="network"),
        pytest.param(
            {"kappa": "network", "misfit": "absolute", "source": "one", "noise": 0.01},
            id="absolute",
        ),
        pytest.param({"kappa": "cells", "smoothing": 0.1}, id="cells"),
    ],
)
def test_loss_and_gradient_do_not_depend_on_the_number_of_ranks(comm, alone, changes):
    results = []
    for ranks in (comm, alone):
        problem = inverse_problem(settings(**changes), ranks)
        results.append(mpigrad.jit(problem.value_and_grad)(first_parameters(problem)))
    (value, gradient), (reference, expected) = results
    mpigrad.assert_replicated(gradient, comm)
    assert float(value) == pytest.approx(float(reference), rel=1e-9)
    for g, e in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert np.max(np.abs(g - e)) <= 1e-9 * np.max(np.abs(e))


@pytest.mark.full("another test compares the gradients of all ranks, too")
def test_gradient_is_the_same_bit_for_bit_on_all_ranks(comm):
    problem = inverse_problem(settings(), comm)
    _, gradient = mpigrad.jit(problem.value_and_grad)(first_parameters(problem))
    mine = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]
    for theirs in comm.mpi.allgather(mine):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.thin(1)
def test_loss_of_the_truth_is_zero_and_of_no_solution_one(comm):
    problem = inverse_problem(settings(), comm)
    grid = problem.model.grid
    u = problem.model.solution(jnp.asarray(problem.true_kappa), problem.solver)
    total = sum(comm.mpi.allgather(float(problem.observations.loss(u))))
    assert total < 1e-20
    nothing = problem.observations.loss(jnp.zeros(grid.local_shape))
    assert sum(comm.mpi.allgather(float(nothing))) == pytest.approx(1, rel=1e-12)


def test_failed_solve_gives_a_loss_of_nan_on_all_ranks(comm):
    problem = inverse_problem(settings(kappa="cells"), comm)
    value, _ = mpigrad.jit(problem.value_and_grad)(jnp.full(CELLS, jnp.nan))
    assert np.isnan(float(value))


@pytest.mark.thin(1)
def test_best_constant_is_found(comm):
    problem = inverse_problem(settings(kappa="cells"), comm)
    constant = best_constant(problem)
    assert 1.2 < constant < 2.2  # kappa is between 1 and 3
    theta = jnp.full(CELLS, np.log(constant))
    value, gradient = mpigrad.jit(problem.value_and_grad)(theta)
    assert abs(float(jnp.sum(gradient))) < 1e-8 * float(value)


@pytest.mark.ranks(1)
def test_network_in_blocks_is_the_network_at_all_points():
    network = Network(jax.random.key(2))
    x, y = jnp.asarray(np.random.default_rng(0).random((2, 1201)))  # three uneven blocks

    def loss(f):
        return lambda network: jnp.sum(f(network) * x)

    found, gradient = jax.value_and_grad(loss(lambda n: n(x, y)))(network)
    value, expected = jax.value_and_grad(loss(lambda n: n._at_points(x, y)))(network)
    assert float(found) == pytest.approx(float(value), rel=1e-14)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert np.allclose(a, b, rtol=1e-11, atol=1e-11 * np.abs(b).max())


@pytest.mark.ranks(1)
def test_network_is_the_papers():
    network = Network(jax.random.key(0))
    assert network.sizes == (2, 20, 20, 20, 1)
    assert sum(leaf.size for leaf in jax.tree.leaves(network)) == 921
    many = Network(jax.random.key(1), (2, 400, 400, 1))
    assert float(jnp.std(many.weights[1])) == pytest.approx(400**-0.5, rel=0.02)
    x = jnp.asarray([0.0, 0.3, 1.0])
    z = np.stack([2 * x - 1, 2 * x - 1])
    for weight in network.weights[:-1]:
        z = np.tanh(np.asarray(weight) @ z)
    assert np.allclose(network(x, x), np.abs(np.asarray(network.weights[-1]) @ z + 5)[0])
