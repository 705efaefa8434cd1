"""Each rank prints its rank and arguments."""

import os
import sys

from mpi4py import MPI

world = MPI.COMM_WORLD
for line in world.gather(f"rank {world.rank} of {world.size}: {sys.argv[1:]}") or []:
    print(line)
if world.rank == 0:
    print("threads", os.environ["OMP_NUM_THREADS"], "terminal", os.environ["MPIGRAD_TERMINAL"])
