"""Iterates of the Poisson problem: unknowns on one rank, replicated, and in tiles."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from mpi4py import MPI

from mpigrad import sparse
from mpigrad.communicator import Communicator
from mpigrad.optimize import minimize, root_objective
from mpigrad_apps.poisson import Settings, inverse_problem

SETTINGS = Settings(cells=(7, 6), kappa="cells", smoothing=0.1)
SOLVER = sparse.PCG(rtol=1e-13, preconditioner=sparse.Jacobi())


def posed(comm, whole):
    """Return share of the loss, first theta = log kappa (replicated or in tiles), and grid."""
    problem = inverse_problem(SETTINGS, comm)
    grid = problem.model.grid

    def share(theta):
        kappa = jnp.exp(theta[grid.slices] if whole else theta)
        u = problem.model.solution(kappa, SOLVER)
        return problem.observations.loss(u) + 0.1 * problem.model.roughness(jnp.log(kappa))

    first = problem.parametrization.first(None, 0)
    return share, first if whole else first[grid.slices], grid


def iterates(comm, whole):
    """Return the global theta after each iteration."""
    share, x0, grid = posed(comm, whole)
    found = []

    def note(_, theta):
        found.append(np.asarray(theta if whole else comm.mpi.bcast(grid.gather(theta))))

    sharded = False if whole else grid
    minimize(share, x0, sharded=sharded, max_steps=10, callback=note, comm=comm, rtol=1e-14)
    return np.stack(found)


def driven(comm):
    """Run the same problem with SciPy on the root."""
    share, x0, _ = posed(comm, True)
    with root_objective(share, x0, comm=comm) as objective:
        if objective:
            objective.result = [objective.x0]
            scipy.optimize.minimize(
                objective.value_and_gradient, objective.x0, jac=True, method="L-BFGS-B",
                options={"maxiter": 10, "gtol": 0, "ftol": 0},
                callback=lambda x: objective.result.append(np.array(x)),
            )  # fmt: skip
    return np.stack(objective.result)


@pytest.mark.full("test_iterates.py compares all layouts on a smaller objective")
def test_poisson_iterates_do_not_depend_on_the_layout(comm):
    expected = iterates(Communicator(MPI.COMM_SELF), True)
    assert len(expected) == 11
    scale = np.max(np.abs(expected[1:]))
    for whole in (True, False):
        assert np.max(np.abs(iterates(comm, whole) - expected)) < 1e-8 * scale, whole


@pytest.mark.full("test_root_worker.py compares steps of SciPy on a smaller objective")
def test_poisson_iterates_of_an_optimizer_on_the_root(comm):
    expected = driven(Communicator(MPI.COMM_SELF))
    assert len(expected) == 11
    assert np.max(np.abs(driven(comm) - expected)) < 1e-8 * np.max(np.abs(expected[1:]))
