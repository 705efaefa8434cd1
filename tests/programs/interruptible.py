"""Work until asked to end, then print a text and end.

With "stubborn", continue anyway. With "report", write a report of 3.5 seconds first.
"""

import sys
import time

from mpi4py import MPI

from mpigrad import checkpoint

world = MPI.COMM_WORLD
with checkpoint.listen() as stop:
    if world.rank == 0:
        print("working", flush=True)
    while not world.bcast(stop.requested()) or sys.argv[1:] == ["stubborn"]:
        time.sleep(0.05)
    if sys.argv[1:] == ["report"]:
        with stop.hold_grace_time():
            time.sleep(3.5)
if world.rank == 0:
    print("saved", flush=True)
sys.exit(5)
