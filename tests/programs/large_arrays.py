"""Compute repeatedly with large arrays, and count the pages that the kernel provides."""

import resource

import jax
import jax.numpy as jnp
from mpi4py import MPI

import mpigrad

CALLS = 10
f = mpigrad.jit(lambda x: mpigrad.allreduce(jnp.sin(x)) + 1)
x = jnp.zeros(1 << 24, jnp.float32)  # 64 MiB
for _ in range(2):
    y = jax.block_until_ready(f(x))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(CALLS):
    y = jax.block_until_ready(f(x))
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
if MPI.COMM_WORLD.rank == 0:
    print(f"page faults of a call: {faults / CALLS:.0f}")
