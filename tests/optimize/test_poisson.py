"""The Poisson problem's iterates: unknowns on one rank, on all of them, and tile by tile."""

import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

from mpigrad import sparse
from mpigrad.communicator import Communicator
from mpigrad.optimize import minimize
from mpigrad.problems.poisson import Settings, inverse_problem


@pytest.mark.thin(2)
def test_poisson_iterates_do_not_depend_on_where_unknowns_live(comm):
    settings = Settings(cells=(7, 6), kappa="cells", smoothing=0.1)
    solver = sparse.PCG(rtol=1e-13, preconditioner=sparse.Jacobi())

    def iterates(comm, whole):
        """The whole of theta = log kappa after each iteration."""
        problem = inverse_problem(settings, comm)
        grid = problem.model.grid
        first = problem.parametrization.first(None, 0)

        def share(theta):
            kappa = jnp.exp(theta[grid.slices] if whole else theta)
            u = problem.model.solution(kappa, solver)
            return problem.observations.loss(u) + 0.1 * problem.model.roughness(jnp.log(kappa))

        found = []

        def note(_, theta):
            field = theta if whole else grid.gather(theta)
            found.append(np.asarray(comm.mpi.bcast(field)))

        x0 = first if whole else first[grid.slices]
        sharded = False if whole else grid
        minimize(share, x0, sharded=sharded, iterations=10, callback=note, comm=comm, rtol=1e-14)
        return np.stack(found)

    expected = iterates(Communicator(MPI.COMM_SELF), True)
    assert len(expected) == 11
    scale = np.max(np.abs(expected[1:]))
    for whole in (True, False):
        assert np.max(np.abs(iterates(comm, whole) - expected)) < 1e-8 * scale, whole
