"""What the watchdog and the board cost small messages: with them, and without.

    mpigrad launch -n 2 bench/watch.py [--rounds 201] [--messages 1000]

Loops of messages within one compiled program. Both ranks turn the records off and on at once, in
turn; printed are medians over rounds of the slowest rank's time of a message, and of the ratios
with / without within a round, with quartiles.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import mpigrad
from mpigrad.communicator import default
from mpigrad.native import library

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=201)
parser.add_argument("--messages", type=int, default=1000, help="in one program")
options = parser.parse_args()

comm = default()
rank, size = comm.rank, comm.size
OPERATIONS = {
    "allreduce": lambda x: 0.5 * mpigrad.allreduce(x),
    "bcast": mpigrad.bcast,
    "sendrecv": lambda x: mpigrad.sendrecv(x, (rank + 1) % size, (rank - 1) % size),
}
SIZES = {"8 B": 1, "8 KiB": 1024}


def seconds(program, x, watched):
    """Of one message on the slowest rank."""
    comm.mpi.Barrier()
    library().mpigrad_set_watched(int(watched))
    start = time.perf_counter()
    jax.block_until_ready(program(x))
    passed = time.perf_counter() - start
    library().mpigrad_set_watched(1)
    return max(comm.mpi.allgather(passed)) / options.messages


if rank == 0:
    print(f"{size} ranks, {options.rounds} rounds of {options.messages} messages; microseconds")
    print(f"{'':22}  without     with  with / without (quartiles)")
for size_name, elements in SIZES.items():
    for name, operation in OPERATIONS.items():
        step = lambda y, _, operation=operation: (operation(y), None)
        program = mpigrad.jit(
            lambda x, step=step: jax.lax.scan(step, x, length=options.messages)[0]
        )
        x = jnp.ones(elements)
        jax.block_until_ready(program(x))
        times = {True: [], False: []}
        for n in range(options.rounds):
            for watched in (n % 2 == 0, n % 2 == 1):
                times[watched].append(seconds(program, x, watched))
        ratios = [a / b for a, b in zip(times[True], times[False], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        off, on = (1e6 * statistics.median(times[w]) for w in (False, True))
        if rank == 0:
            what = f"{name} of {size_name}"
            print(f"{what:22} {off:8.3f} {on:8.3f}  {middle:.3f} ({low:.3f} to {high:.3f})")
