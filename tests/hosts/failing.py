"""Rank 1 fails while the others wait for it."""

import jax.numpy as jnp

import mpigrad
from mpigrad.communicator import default_communicator

if default_communicator().rank == 1:
    raise ValueError("rank 1 has had enough")
mpigrad.allreduce(jnp.ones(2))
