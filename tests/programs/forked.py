"""Fork children from both ranks, which end in every way while the ranks continue."""

import multiprocessing
import os
import sys
from sys import exit as leave

import jax.numpy as jnp

import mpigrad as mg

rank = int(mg.scan(jnp.int32(1))) - 1
print("before", end=" ")  # in the child's buffer, too


def ended(child):
    """Return the exit code of a child that calls this, or minus the signal that ended it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    child()
    print(f"child of {rank} at its end")
    sys.exit()


def fails():
    raise ArithmeticError(f"in a child of {rank}")


def raises():
    raise SystemExit(4)


WAYS = fails, lambda: sys.exit(3), lambda: sys.exit("no"), raises, lambda: exit(5), lambda: 0  # noqa: PLR1722
codes = [ended(way) for way in WAYS[rank::2]]
if rank == 0:
    process = multiprocessing.get_context("fork").Process(target=leave, args=(6,))
    process.start()
    process.join()
    codes.append(process.exitcode)
if rank == 1 and os.fork() == 0:  # and one that comes to the end of the program
    codes = []
else:
    if rank == 1:
        os.wait()
    print(f"rank {rank}: {codes}, still {mg.allreduce(1)}\n", end="", flush=True)
