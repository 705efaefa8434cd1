"""Rank 1 ends in the way of the first argument, while the others wait for it."""

import os
import signal
import sys
import time

from mpi4py import MPI

world = MPI.COMM_WORLD
if world.rank == 1:
    match sys.argv[1]:
        case "raise":
            raise ValueError("rank 1 has had enough")
        case "exit":
            sys.exit(3)
        case "vanish":
            os._exit(4)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            print("hanging", flush=True)
            time.sleep(1000)
world.Barrier()
