"""Errors of a program that is driven by the root: `served.py CASE` on 2 ranks."""

import sys
import time

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad
from mpigrad import optimize

rank = MPI.COMM_WORLD.rank
case = sys.argv[1]


def both(x):
    if case == "a rank fails" and rank == 1 and x[0] > 1:
        raise ArithmeticError("the mesh of rank 1 is empty")
    return mpigrad.allreduce(jnp.sum(x**2)), 2 * x


with optimize.root_objective(None, np.ones(2), value_and_grad=both) as objective:
    if objective:
        objective.value_and_gradient(np.ones(2))
        match case:
            case "a rank fails":  # while the root waits for it inside the evaluation
                objective.value_and_gradient(2 * np.ones(2))
            case "the root fails":
                raise ArithmeticError("a step of no length")
            case "the root leaves":
                sys.exit(5)
            case "the root calls all ranks":
                mpigrad.allreduce(jnp.ones(2))
            case "the root thinks":  # longer than an operation may wait
                time.sleep(4)
        objective.result = objective.value(3 * np.ones(2))
print(f"result {objective.result:.0f}", flush=True)
