"""A rod on a ring of ranks. The second rank has four times as many points as the others.

Each step exchanges the ends with both neighbours, and the loss is summed over ranks. The other
ranks wait for the second rank. The profile shows on which lines and how long (docs/seeing.md):

    mpigrad launch -n 3 --profile examples/rod.py
"""

import jax.numpy as jnp
from mpi4py import MPI

import mpigrad as mg

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
right, left = (rank + 1) % size, (rank - 1) % size


@mg.jit
@mg.grad
def gradient(u):
    for _ in range(2):
        before = mg.sendrecv(u[-1:], right, left)
        after = mg.sendrecv(u[:1], left, right)
        v = jnp.concatenate([before, u, after])
        u = jnp.tanh(u + 0.1 * (v[2:] - 2 * u + v[:-2]))
    return mg.allreduce(jnp.sum(u**2)) / size


u = jnp.linspace(0, 1, 600_000 if rank == 1 else 150_000)
for _ in range(5):
    u = u - 0.1 * gradient(u)
