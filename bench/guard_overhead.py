"""Measure the cost of the watchdog and the board for small messages.

    mpigrad launch -n 2 bench/guard_overhead.py [--rounds 201] [--messages 1000]

Loops of messages run within one compiled program in three modes. In the first mode ranks record
nothing. In the second they record their operation and its start time, for the watchdog. In the
third they also record contracts, sent and received messages, to prove a hang. All ranks change
between the modes at the same time. The program prints medians over rounds of the slowest rank's
time of a message, and of the ratios to the first mode within a round, with quartiles.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import mpigrad
from mpigrad.communicator import default_communicator
from mpigrad.runtime.native import library

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=201)
parser.add_argument("--messages", type=int, default=1000, help="in one program")
options = parser.parse_args()

comm = default_communicator()
rank, size = comm.rank, comm.size
OPERATIONS = {
    "allreduce": lambda x: 0.5 * mpigrad.allreduce(x),
    "bcast": mpigrad.bcast,
    "sendrecv": lambda x: mpigrad.sendrecv(x, (rank + 1) % size, (rank - 1) % size),
}
SIZES = {"8 B": 1, "8 KiB": 1024}


NOTED = {"nothing": 0, "where": 1, "all": 2}  # native/guard/watch.h


def seconds(program, x, noted):
    """Measure the seconds of one message on the slowest rank."""
    comm.mpi.Barrier()
    library().mpigrad_set_recording(noted)
    start = time.perf_counter()
    jax.block_until_ready(program(x))
    passed = time.perf_counter() - start
    library().mpigrad_set_recording(NOTED["all"])
    return max(comm.mpi.allgather(passed)) / options.messages


def ratio(times, noted):
    pairs = zip(times[noted], times["nothing"], strict=True)
    low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if rank == 0:
    print(f"{size} ranks, {options.rounds} rounds of {options.messages} messages; microseconds")
    print(f"{'':22} nothing  where    all   where / nothing         all / nothing")
for size_name, elements in SIZES.items():
    for name, operation in OPERATIONS.items():
        step = lambda y, _, operation=operation: (operation(y), None)
        program = mpigrad.jit(
            lambda x, step=step: jax.lax.scan(step, x, length=options.messages)[0]
        )
        x = jnp.ones(elements)
        jax.block_until_ready(program(x))
        times = {noted: [] for noted in NOTED}
        for n in range(options.rounds):
            turn = list(NOTED)[n % 3 :] + list(NOTED)[: n % 3]
            for noted in turn:
                times[noted].append(seconds(program, x, NOTED[noted]))
        medians = " ".join(f"{1e6 * statistics.median(times[n]):7.3f}" for n in NOTED)
        if rank == 0:
            what = f"{name} of {size_name}"
            print(f"{what:22}{medians}  {ratio(times, 'where')}  {ratio(times, 'all')}")
