"""Two mistakes on two ranks while the GPU is busy; the job must end with a report that names them.

mpigrad launch -n 2 tests/gpu/faults.py (raises|deadlock|apart)
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

import mpigrad as mg

MISTAKE = sys.argv[1]
rank = mg.default_communicator().rank


@mg.jit
def busy(x: jax.Array) -> jax.Array:
    """Compute for some tenths of a second before the message."""
    x = jax.lax.fori_loop(0, 10_000, lambda _, x: jnp.sin(x), x)
    return mg.allreduce(x)


@mg.jit
def receive(x: jax.Array) -> jax.Array:
    return mg.recv(busy(x), 1 - rank)


n = 30 if jax.default_backend() == "cpu" else 3000
x = jnp.ones((n, n), jnp.float32)
if MISTAKE == "raises":
    if rank == 1:
        raise ValueError("rank 1 has found bad input")
    receive(x).block_until_ready()
elif MISTAKE == "deadlock":
    receive(x).block_until_ready()
else:
    busy(x).block_until_ready()
    if rank == 0:
        mg.recv(x, 1).block_until_ready()
print("the end was not expected")
