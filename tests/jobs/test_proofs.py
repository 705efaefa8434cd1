"""Dot test and Taylor test over all ranks, with cotangents that differ between ranks."""

import jax
import numpy as np
import pytest
from job_cases import arguments, items, misfit, moments

import mpigrad as mg
from mpigrad import jobs


def everywhere(tree, comm):
    """Broadcast arguments and their tangents, because arguments of jobs are replicated."""
    return mg.bcast(tree, comm=comm)


@pytest.mark.parametrize("derivatives", ["jacobian", "adjoint"])
def test_dot(comm, derivatives):
    pool = jobs.pool(comm)
    floats = lambda *job: moments(*job)["m"]
    f = pool.map(floats, pool.put(items(), block=2), derivatives=derivatives)
    mg.dot_test(lambda *xs: f(*everywhere(xs, comm)), *arguments(), comm=comm)


def test_taylor(comm):
    params, item_params = arguments()
    pool = jobs.pool(comm)
    total = pool.sum(misfit, pool.put(items(ragged=True), block=2))
    test = mg.taylor_test(
        lambda xs: total(*xs), (params, item_params), loss="replicated", replicated=True, comm=comm
    )
    assert np.allclose(test.rates_with[-1], 2, atol=0.2)


@pytest.mark.full("autodiff/test_gradient_checks has wrong gradients without a pool")
def test_taylor_of_a_wrong_gradient(comm):
    """The value of one function with the gradient of another."""
    pool = jobs.pool(comm)
    total = pool.sum(misfit, pool.put(items(ragged=True), block=2))
    doubled = lambda x: 2 * x - jax.lax.stop_gradient(x)
    with pytest.raises(AssertionError):
        mg.taylor_test(
            lambda xs: total(jax.tree.map(doubled, xs[0]), xs[1]), arguments(),
            loss="replicated", replicated=True, comm=comm,
        )  # fmt: skip
