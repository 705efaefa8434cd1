"""Messages of every kind while /dev/shm is full: rank 0 fills it after the start of mpigrad."""

import contextlib
import os

import jax.numpy as jnp
from mpi4py import MPI

import mpigrad as mg

rank = MPI.COMM_WORLD.rank
if rank == 0:
    with contextlib.suppress(OSError), open("/dev/shm/filled", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with contextlib.suppress(OSError), open("/dev/shm/filled", "ab", buffering=0) as file:
        while True:
            file.write(bytes(256))
    assert os.statvfs("/dev/shm").f_bavail == 0
mg.barrier()


@mg.jit
def exchange(x):
    total = mg.allreduce(jnp.ones(5000))[0]
    for tag in range(60):  # channels on each page of the board
        total += mg.sendrecv(x + tag, 1 - rank, 1 - rank, sendtag=tag, recvtag=tag).sum()
    return total


# Four times, so that there are announcements all over the ring.
total = sum(float(exchange(jnp.ones(3) * rank)) for _ in range(4))
print(f"rank {rank}: {total:g}", flush=True)
