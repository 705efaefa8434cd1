"""A broken program: the last rank broadcasts while the others sum."""

import jax.numpy as jnp
from mpi4py import MPI

import mpigrad as mg

x = jnp.ones(3)
if MPI.COMM_WORLD.rank < MPI.COMM_WORLD.size - 1:
    mg.allreduce(x)  # the line that the report names for the first rank
else:
    mg.bcast(x)
