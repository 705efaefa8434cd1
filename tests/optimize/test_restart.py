"""minimize with restart files: the states of all methods, replicated and sharded."""

import dataclasses

import jax
import numpy as np
from layouts import X0, N, striped
from mpi4py import MPI
from test_iterates import METHODS

from mpigrad.checkpoint import Checkpoint
from mpigrad.communicator import Communicator
from mpigrad.optimize import Objective, Result, minimize


def without_seconds(solution):
    return [dataclasses.replace(record, seconds=0) for record in solution.stats["history"]]


def test_an_interrupted_run_has_the_same_result(chains, comm, tmp_path):
    directory = comm.mpi.bcast(tmp_path)
    objective, x0, _ = chains["mixed"]
    for name, method in METHODS.items():
        checkpoint = Checkpoint(directory / name, minutes=None, resume=True)
        whole = minimize(objective, x0, method, max_steps=14)
        first = minimize(objective, x0, method, max_steps=13, checkpoint=checkpoint)
        assert first.result is Result.MAX_STEPS_REACHED
        # The memory of L-BFGS is full, and the oldest pair is not in its first row.
        other = jax.tree.map(np.zeros_like, x0)
        second = minimize(objective, other, method, max_steps=14, checkpoint=checkpoint)
        for count in ("num_steps", "evaluations", "products"):
            assert second.stats[count] == whole.stats[count], name
        assert len(second.stats["history"]) == 15
        assert without_seconds(second) == without_seconds(whole)
        for a, b in zip(jax.tree.leaves(second.value), jax.tree.leaves(whole.value), strict=True):
            assert np.array_equal(a, b), name
        assert second.stats["loss"] == whole.stats["loss"]


def test_continuing_on_fewer_ranks(chains, comm, tmp_path):
    """Equal to rounding: the stripes of the unknowns and of the memory of L-BFGS are joined."""
    directory = comm.mpi.bcast(tmp_path)
    objective, x0, _ = chains["sharded"]
    method = METHODS["L-BFGS"]
    checkpoint = Checkpoint(directory, minutes=None, resume=True)
    minimize(objective, x0, method, max_steps=8, checkpoint=checkpoint)
    comm.mpi.Barrier()
    if comm.rank == 0:
        alone = Communicator(MPI.COMM_SELF)
        fewer = Objective(lambda x: striped(x, None, alone), X0, sharded=True, comm=alone)
        ended = minimize(fewer, np.zeros(N), method, max_steps=10, checkpoint=checkpoint)
        expected = minimize(chains["serial"][0], X0, method, max_steps=10)
        assert np.allclose(ended.value, expected.value, rtol=1e-9)
        assert [r.iteration for r in ended.stats["history"]] == list(range(11))
