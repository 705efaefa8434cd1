"""Rank 1 fails while the others wait for it."""

import jax.numpy as jnp

import mpigrad
from mpigrad.communicator import default

if default().rank == 1:
    raise ValueError("rank 1 has had enough")
mpigrad.allreduce(jnp.ones(2))
