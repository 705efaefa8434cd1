"""Ranks 0 and 2 exchange messages, and the others do nothing."""

import jax.numpy as jnp
from mpi4py import MPI

import mpigrad as mg

rank = MPI.COMM_WORLD.rank


def f(x):
    if rank == 2:
        mg.send(x, dest=0)
    if rank == 0:
        x = mg.recv(x, source=2)
    return x


if rank in (0, 2):
    value = float(mg.jvp(f, (jnp.float32(rank),), (jnp.float32(1),))[0])
    print(f"rank {rank}: {value}\n", end="", flush=True)  # one write: lines of ranks stay whole
