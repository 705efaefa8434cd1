"""Synchronous training in which rank 1 fails, or with `leave` exits the program."""

import sys

import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

from mpigrad.training import Batches, trainer


def take(rows):
    if MPI.COMM_WORLD.rank == 1 and take.calls == 5:
        if "leave" in sys.argv:
            sys.exit()
        raise LookupError("no file of that name")
    take.calls += 1
    return (np.ones((len(rows), 4)),)


take.calls = 0
training = trainer({"w": jnp.ones(4)}, optax.sgd(0.1), lambda p, x: jnp.mean((x @ p["w"]) ** 2))
training.run(Batches(40, 8, take=take))
