"""A run that saves after each step: `resumed.py DIRECTORY STEPS [RANK:CALL]`.

It goes on from its last save, and writes its result beside it. With RANK:CALL, that rank kills
itself at that call of os.fsync or os.rename, counted from the first step on: within a save.
"""

import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad.checkpoint import Checkpoint
from mpigrad.communicator import default

ROWS = 4000

jax.config.update("jax_enable_x64", True)
comm = default()
directory, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
mine = np.array_split(np.arange(ROWS), comm.size)[comm.rank]


def step(state):
    """Noisy descent with momentum towards x = 1, as fast as the mean of all x allows."""
    key, noise = jax.random.split(state["key"])
    mean = mpigrad.allreduce(jnp.sum(state["x"])) / ROWS
    slope = state["x"] - 1 + 0.1 * jax.random.normal(noise, (ROWS,))[mine]
    velocity = 0.9 * state["velocity"] - 0.1 * slope / (1 + mean**2)
    return {"x": state["x"] + velocity, "velocity": velocity, "key": key, "mean": mean}


def die_in_a_save(call):
    """Kill this process at the n-th call of what makes a save safe."""
    calls = 0

    def deadly(original):
        def counted(*arguments):
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        return counted

    os.fsync, os.rename = deadly(os.fsync), deadly(os.rename)


x = jnp.sin(jnp.asarray(mine, float))
state = {"x": x, "velocity": 0 * x, "key": jax.random.key(1), "mean": jnp.zeros(())}
layout = {"x": True, "velocity": True, "key": False, "mean": False}
advance = mpigrad.jit(step)

with Checkpoint(directory, every=1).start(comm) as saving:
    saved = saving.load(state, layout)
    first = 0
    if saved is not None:
        first, state = saved.step, saved.tree
    advance(state)  # compiled before anything is said
    print(f"rank {comm.rank} pid {os.getpid()} step {first}", flush=True)
    if len(sys.argv) > 3 and sys.argv[3].startswith(f"{comm.rank}:"):
        die_in_a_save(int(sys.argv[3].split(":")[1]))
    stopped = False
    for i in range(first + 1, steps + 1):
        state = advance(state)
        decision = saving.decide(i)
        if decision.save:
            saving.save(i, state, layout)
        if comm.rank == 0:
            print(f"step {i}", flush=True)
        if decision.stop:
            stopped = True
            break
whole = comm.mpi.gather(np.asarray(state["x"]))
if whole is not None:
    if not stopped:
        np.save(directory / "result.npy", np.concatenate(whole))
    print("stopped" if stopped else "done", flush=True)
