"""Training of known functions, and what is left when it ends early."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad import sparse
from mpigrad_apps.fitting import prepare_training, train
from mpigrad_apps.poisson import Settings, inverse_problem, load_network


def rosenbrock(comm):
    """Every rank's share is its part of the whole function."""

    def share(p):
        return jnp.sum((1 - p["x"]) ** 2 + 100 * (p["y"] - p["x"] ** 2) ** 2) / comm.size

    return share


FIRST = {"x": jnp.asarray([-1.0, 2.0]), "y": jnp.asarray([2.0, 0.0])}


def test_training_ends_where_the_gradient_is_zero(comm, directory):
    saved = []
    prepare_training(directory, comm, False)
    start = {"x": jnp.ones(1), "y": jnp.ones(1)}
    trained = train(rosenbrock(comm), start, 50, comm, memory=10, out=directory, save=saved.append)
    assert trained.ending == "gradient zero at iteration 0"
    assert len(saved) == (comm.rank == 0)


def test_stages_go_on_where_they_were_with_their_errors(comm, directory):
    """As if it had been one run: parameters and history, but for the seconds."""

    def error(p):
        return float(jnp.max(jnp.abs(p["x"] - 1)))

    def two_stages(out, iterations, resume):
        prepare_training(out, comm, resume)
        parameters, trained = FIRST, None
        for stage in (0, 1):
            trained = train(
                rosenbrock(comm), parameters, iterations[stage], comm, memory=5, out=out,
                save=lambda best: None, error=error, stage=stage, about={"data": "mine"},
            )  # fmt: skip
            parameters = trained.parameters
        return trained

    for name in ("whole", "part"):
        if comm.rank == 0:
            (directory / name).mkdir()
    comm.mpi.Barrier()
    whole = two_stages(directory / "whole", (12, 15), False)
    two_stages(directory / "part", (12, 6), False)
    if comm.rank == 0:  # a job that is killed leaves half a line
        with (directory / "part" / "history.jsonl").open("a") as file:
            file.write('{"iteration": 7, "lo')
    comm.mpi.Barrier()
    part = two_stages(directory / "part", (12, 15), True)
    for a, b in zip(
        jax.tree.leaves(part.parameters), jax.tree.leaves(whole.parameters), strict=True
    ):
        assert np.array_equal(a, b)
    timeless = [[dataclasses.replace(r, seconds=0.0) for r in t.history] for t in (part, whole)]
    errors = {r.iteration: r.error for r in timeless[0] if r.stage == 1}
    assert errors.pop(6) is not None  # the last one of the part was measured
    assert [dataclasses.replace(r, error=None) for r in timeless[0]] == [
        dataclasses.replace(r, error=None) for r in timeless[1]
    ]
    assert errors[10] == timeless[1][13 + 10].error is not None
    assert part.ending == "all 15 iterations done"
    comm.mpi.Barrier()
    lines = (directory / "part" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [r.loss for r in part.history]
    with pytest.raises(
        ValueError, match="is of another run: data is mine in its fingerprint and yours in this run"
    ):
        train(
            rosenbrock(comm), FIRST, 20, comm, memory=5, out=directory / "part",
            save=lambda best: None, about={"data": "yours"},
        )  # fmt: skip
    comm.mpi.Barrier()
    prepare_training(directory / "part", comm, False)
    comm.mpi.Barrier()
    assert not (directory / "part" / "restart").exists()


@pytest.mark.thin(1)
def test_failing_solves_leave_what_was_reached(comm, directory):
    """One iteration of conjugate gradients is not enough: no parameters have a loss."""
    problem = inverse_problem(Settings(cells=(8, 9)), comm)
    problem = dataclasses.replace(
        problem, solver=sparse.PCG(rtol=1e-10, max_steps=1, preconditioner=sparse.Jacobi())
    )
    values, network = problem.parametrization, directory / "network.eqx"
    first = values.first(None, 0)
    prepare_training(directory, comm, False)
    with pytest.raises(RuntimeError, match=r"the loss of x0 is nan.*\(Start from other parameters"):
        train(
            problem.loss_share, first, 10, comm, memory=50, out=directory,
            save=lambda best: values.save(network, best),
        )  # fmt: skip
    comm.mpi.Barrier()
    loaded = load_network(network)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(first), strict=True):
        assert np.array_equal(a, b)
