"""Random operations for some seconds, the same ones on all ranks, with values that are known.

python random_messages.py SEED SECONDS

Each rank prints "rank R has pid P" when everything is compiled, and rank 0 "done N" at the end.
"""

import os
import random
import sys
import time

import jax.numpy as jnp
import numpy as np

import mpigrad as mg

comm = mg.default_communicator()
rank, size = comm.rank, comm.size
dice = random.Random(int(sys.argv[1]))  # in step on all ranks
x = jnp.arange(300.0) + rank
total = jnp.arange(300.0) * size + sum(range(size))


def ring(x):
    return mg.sendrecv(x, dest=(rank + 1) % size, source=(rank - 1) % size)


def posted(x):
    request = mg.isend(x, (rank + 1) % size)
    before = mg.recv(x, (rank - 1) % size)
    mg.wait(request)
    return before


before = jnp.arange(300.0) + (rank - 1) % size
CHOICES = [
    (mg.jit(mg.allreduce), total),
    (mg.jit(lambda x: mg.bcast(x, size - 1)), jnp.arange(300.0) + size - 1),
    (mg.jit(ring), before),
    (mg.jit(posted), before),
    (mg.jit(mg.grad(lambda x: jnp.sum(ring(x) ** 2))), 2 * x),
]
for call, expected in CHOICES:  # nothing is imported later, without a file descriptor
    np.testing.assert_array_equal(call(x), expected)
print(f"rank {rank} has pid {os.getpid()}\n", end="", flush=True)
end, n = time.monotonic() + float(sys.argv[2]), 0
going = True
while going:
    for _ in range(50):
        call, expected = dice.choice(CHOICES)
        np.testing.assert_array_equal(call(x), expected)
        if dice.random() < 0.1 and dice.randrange(size) == rank:
            time.sleep(0.02)
        n += 1
    going = bool(mg.bcast(jnp.array(time.monotonic() < end)))
if rank == 0:
    print(f"done {n}", flush=True)
