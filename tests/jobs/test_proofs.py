"""Dot test and Taylor test over all ranks; cotangents differ between ranks, arguments do not."""

import jax
import numpy as np
import pytest
from job_cases import arguments, misfit, moments, records

import mpigrad as mg
from mpigrad import jobs

pytestmark = pytest.mark.thin(2)


def everywhere(tree, comm):
    """Rank 0's on all ranks, as jobs want arguments; tangents become alike, too."""
    return mg.bcast(tree, comm=comm)


@pytest.mark.parametrize("derivatives", ["jacobian", "adjoint"])
def test_dot(comm, derivatives):
    pool = jobs.pool(comm)
    floats = lambda *job: moments(*job)["m"]
    f = pool.map(floats, pool.put(records(), block=2), derivatives=derivatives)
    mg.dot_test(lambda *xs: f(*everywhere(xs, comm)), *arguments(), comm=comm)


def test_taylor(comm):
    shared, per_job = arguments()
    pool = jobs.pool(comm)
    total = pool.sum(misfit, pool.put(records(ragged=True), block=2))
    test = mg.taylor_test(
        lambda xs: total(*xs), (shared, per_job), loss="replicated", replicated=True, comm=comm
    )
    assert np.allclose(test.rates_with[-1], 2, atol=0.2)
    # The value of one function with the gradient of another: the test must see it.
    doubled = lambda x: 2 * x - jax.lax.stop_gradient(x)
    with pytest.raises(AssertionError):
        mg.taylor_test(
            lambda xs: total(jax.tree.map(doubled, xs[0]), xs[1]), (shared, per_job),
            loss="replicated", replicated=True, comm=comm,
        )  # fmt: skip
