"""Every way to minimise the misfit ends at the same model."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from jax.flatten_util import ravel_pytree
from mpi4py import MPI

import mpigrad
from mpigrad import optimize
from mpigrad.communicator import Communicator
from mpigrad_apps.fwi import Settings, prepare_inversion

SETTINGS = Settings(
    cells=(20, 14), spacing=(10.0, 10.0), steps=60, shots=2, receivers=6, pml=4, frequency=20.0,
    water=20.0, precision="float64", tikhonov=3.0,
)  # fmt: skip


def objective(comm):
    """This rank's share of the loss of a vector that every rank has, and where to start."""
    problem = prepare_inversion(SETTINGS, comm)
    start, unravel = ravel_pytree(problem.parametrization.initial(0))
    measure = problem.misfit(None)
    return lambda x: problem.loss_share(measure, unravel(x)), np.asarray(start)


@pytest.mark.full("it minimises to convergence in four ways, which takes long")
@pytest.mark.ranks(1, 2, 3, 4)
def test_the_optimum_does_not_depend_on_ranks_or_method(comm):
    search = functools.partial(optimize.minimize, rtol=1e-8, max_steps=400)
    share, start = objective(Communicator(MPI.COMM_SELF))
    expected = search(share, start, comm=Communicator(MPI.COMM_SELF))
    assert expected.stats["loss"] < 0.5 * expected.stats["history"][0].loss

    share, start = objective(comm)
    replicated = search(share, start, replicated=True, comm=comm)
    counts = [len(part) for part in np.array_split(start, comm.size)]
    mine = np.array_split(start, comm.size)[comm.rank]
    whole = lambda x: mpigrad.allgatherv(x, counts, comm=comm)
    sharded = search(lambda x: share(whole(x)), mine, sharded=True, comm=comm)
    with optimize.root_objective(share, start, comm=comm) as served:
        if served:
            served.result = scipy.optimize.minimize(
                served.value_and_gradient, start, jac=True, method="L-BFGS-B",
                options={"ftol": 0, "gtol": 1e-9, "maxiter": 600},
            )  # fmt: skip
    found = {
        "replicated": (replicated.stats["loss"], replicated.value),
        "sharded": (sharded.stats["loss"], mpigrad.jit(whole)(jnp.asarray(sharded.value))),
        "root-driven": (served.result.fun, served.result.x),
    }
    for name, (loss, x) in found.items():
        assert loss == pytest.approx(expected.stats["loss"], rel=1e-7), name
        difference = np.linalg.norm(np.asarray(x) - np.asarray(expected.value))
        assert difference < 1e-3 * np.linalg.norm(np.asarray(expected.value) - start), name
