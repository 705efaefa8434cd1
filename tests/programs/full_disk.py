"""Saves of growing arrays until the disk is full, then room, then another save.

python full_disk.py DIRECTORY
"""

import pathlib
import sys

import numpy as np

import mpigrad as mg
from mpigrad.checkpoint import Store

comm = mg.default_communicator()
directory = pathlib.Path(sys.argv[1])


def state(step):
    return {"x": np.full(step * 20_000, comm.rank + step / 8)}  # 160 kB for each step and rank


store = Store(directory / "saves", comm)
step = 1
while True:
    try:
        store.save(step, state(step), layout=True)
    except OSError as error:
        name = str(directory) in str(error)
        print(f"rank {comm.rank}: step {step} names the directory: {name}\n", end="", flush=True)
        break
    step += 1
found = Store(directory / "saves", comm, resume=True).load(state(step - 1), layout=True)
np.testing.assert_array_equal(found.tree["x"], state(step - 1)["x"])
comm.mpi.barrier()
if comm.rank == 0:
    (directory / "ballast").unlink()
comm.mpi.barrier()
store.save(step, state(step), layout=True)
print(f"rank {comm.rank}: saved {step} after {found.step}\n", end="", flush=True)
