"""A program whose second rank is late, for the trace and the profile."""

import sys
import time

import jax.numpy as jnp
from mpi4py import MPI

import mpigrad as mg

rank = MPI.COMM_WORLD.rank
twin = mg.default_communicator().dup()


@mg.jit
@mg.grad
def gradient(x):
    y = mg.allreduce(jnp.sin(x))
    if rank == 0:
        mg.send(y, 1, tag=3)
    else:
        y = y * mg.recv(y, 0, tag=3)
    return jnp.sum(mg.bcast(y, root=1, comm=twin) ** 2)


x = jnp.arange(100.0, dtype="float32")
gradient(x)
mg.barrier()
time.sleep(0.5 * rank)
gradient(x)
if "fail" in sys.argv and rank == 1:
    time.sleep(1.0)
    raise ArithmeticError("after two gradients")
mg.barrier()
