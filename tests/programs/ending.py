"""Import modules in the order of the arguments, send a message, and end at once."""

import atexit
import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpigrad as mg  # noqa: E402

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
# Called before mpigrad's own: messages still work.
atexit.register(lambda: print(f"at exit {mg.allreduce(jnp.float32(rank))}\n", end="", flush=True))


@mg.jit
def ring(x):
    step = lambda y, _: (mg.sendrecv(y, (rank + 1) % size, (rank - 1) % size), None)
    return jax.lax.scan(step, x, length=100 * size)[0]


x = ring(jnp.full(1000, float(rank)))  # nobody waits for the result
