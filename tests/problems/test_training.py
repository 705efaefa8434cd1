"""L-BFGS on known functions, and what is left when the training ends early."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad
from mpigrad import sparse
from mpigrad.problems.poisson import LBFGS, Settings, inverse_problem, load_network
from mpigrad.problems.training import train


def rosenbrock(comm):
    """Every rank's share is its part of the whole function."""

    def share(p):
        return jnp.sum((1 - p["x"]) ** 2 + 100 * (p["y"] - p["x"] ** 2) ** 2) / comm.size

    return mpigrad.value_and_grad(share, loss="share", replicated=0, comm=comm)


def test_lbfgs_reaches_the_minimum(comm):
    optimizer = LBFGS(rosenbrock(comm), memory=10, comm=comm)
    now = optimizer.start({"x": jnp.asarray([-1.0, 2.0]), "y": jnp.asarray([2.0, 0.0])})
    assert float(now.loss) == pytest.approx(104.0 + 1601.0)
    for _ in range(60):
        now = optimizer.step(now)
    assert float(now.loss) < 1e-20
    assert np.allclose(now.parameters["x"], 1, atol=1e-9)
    everywhere = comm.mpi.allgather(np.asarray(now.parameters["y"]))
    assert all(np.array_equal(y, everywhere[0]) for y in everywhere)


@pytest.mark.ranks(1, 3)
def test_lbfgs_shortens_steps_into_the_undefined(comm):
    """The minimum of x - log x, not a number beyond 0, where the first full step leads."""

    def share(x):
        return jnp.where(comm.rank == 0, 50 * (x - jnp.log(x)), 0.0)

    optimizer = LBFGS(mpigrad.value_and_grad(share, replicated=0, comm=comm), memory=5, comm=comm)
    now = optimizer.start(jnp.asarray(3.0))
    for _ in range(15):
        now = optimizer.step(now)
    assert float(now.parameters) == pytest.approx(1, abs=1e-8)


def test_training_ends_where_there_is_no_smaller_loss(comm, directory):
    saved = []
    trained = train(
        LBFGS(rosenbrock(comm), memory=10, comm=comm),
        {"x": jnp.ones(1), "y": jnp.ones(1)},
        50,
        comm,
        save=saved.append,
        history_file=directory / "history.jsonl",
    )
    assert trained.ending == "gradient zero at iteration 1"
    assert len(saved) == (comm.rank == 0)


@pytest.mark.thin(2)
def test_failing_solves_leave_what_was_reached(comm, directory):
    """One iteration of conjugate gradients is not enough: no parameters have a loss."""
    problem = inverse_problem(Settings(cells=(8, 9)), comm)
    problem = dataclasses.replace(
        problem, solver=sparse.PCG(rtol=1e-10, max_steps=1, preconditioner=sparse.Jacobi())
    )
    values, network = problem.parametrization, directory / "network.eqx"
    first = values.first(None, 0)
    with pytest.raises(RuntimeError, match="the loss of the first parameters is nan"):
        train(
            LBFGS(problem.value_and_grad),
            first,
            10,
            comm,
            save=lambda standing: values.save(network, standing.best),
            history_file=directory / "history.jsonl",
        )
    comm.mpi.Barrier()
    loaded = load_network(network)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(first), strict=True):
        assert np.array_equal(a, b)
    assert np.isnan(json.loads((directory / "history.jsonl").read_text())["loss"])
