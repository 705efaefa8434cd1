"""A run that saves after each step: `resumed.py loop|minimize DIRECTORY STEPS [RANK:CALL]`.

It continues from its last save and writes its result into DIRECTORY. With RANK:CALL, that rank
kills itself at that call of os.fsync or os.rename, counted from the first step on: within a save.
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
from mpigrad.communicator import default_communicator
from mpigrad.optimize import LBFGS, Result, minimize

ROWS = 4000

jax.config.update("jax_enable_x64", True)
comm = default_communicator()
way, directory, steps = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
mine = np.array_split(np.arange(ROWS), comm.size)[comm.rank]


def say(line):
    """Print a whole line at once, so that lines of ranks do not mix."""
    os.write(1, f"{line}\n".encode())


def begin(step):
    """Print rank and process id. Calls are counted from here on."""
    say(f"rank {comm.rank} pid {os.getpid()} step {step}")
    if len(sys.argv) > 4 and sys.argv[4].startswith(f"{comm.rank}:"):
        die_in_a_save(int(sys.argv[4].split(":")[1]))


def die_in_a_save(call):
    """Kill this process at the n-th call of a function that makes a save safe."""
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


def by_a_loop():
    """Noisy descent with momentum towards x = 1, as fast as the mean of all x allows."""
    x = jnp.sin(jnp.asarray(mine, float))
    state = {"x": x, "velocity": 0 * x, "key": jax.random.key(1), "mean": jnp.zeros(())}
    layout = {"x": True, "velocity": True, "key": False, "mean": False}

    @mpigrad.jit
    def advance(state):
        key, noise = jax.random.split(state["key"])
        mean = mpigrad.allreduce(jnp.sum(state["x"])) / ROWS
        slope = state["x"] - 1 + 0.1 * jax.random.normal(noise, (ROWS,))[mine]
        velocity = 0.9 * state["velocity"] - 0.1 * slope / (1 + mean**2)
        return {"x": state["x"] + velocity, "velocity": velocity, "key": key, "mean": mean}

    with Checkpoint(directory, every=1, resume=True).start(comm) as saving:
        saved = saving.load(state, layout)
        first, state = (0, state) if saved is None else (saved.step, saved.tree)
        advance(state)  # compiled before anything is said
        begin(first)
        for i in range(first + 1, steps + 1):
            state = advance(state)
            decision = saving.decide(i)
            if decision.save:
                saving.save(i, state, layout)
            if comm.rank == 0:
                say(f"step {i}")
            if decision.stop:
                return state["x"], True
    return state["x"], False


def by_minimize():
    """Rosenbrock's function along a chain that is cut between ranks, and a replicated unknown."""
    x0 = {"x": jnp.where(mine % 2 == 0, -1.2, 1.0), "scale": jnp.asarray(2.0)}

    def f(p):
        x, left = p["x"], max(comm.rank - 1, 0)
        if comm.size > 1:
            ends = mpigrad.allgather(x[-1])
            x = jnp.concatenate([ends[left : left + 1], x]) if comm.rank > 0 else x
        chain = jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)
        return chain + (p["scale"] - 1) ** 2 / comm.size

    begun = False

    def note(record, x):
        nonlocal begun
        if not begun:
            begin(record.iteration)
            begun = True
        if comm.rank == 0:
            say(f"step {record.iteration}")

    solution = minimize(
        f, x0, LBFGS(5), sharded={"x": True, "scale": False}, rtol=0.0, max_steps=steps,
        callback=note, checkpoint=Checkpoint(directory, every=1, resume=True), comm=comm,
    )  # fmt: skip
    return solution.value["x"], solution.result is Result.INTERRUPTED


x, stopped = by_a_loop() if way == "loop" else by_minimize()
whole = comm.mpi.gather(np.asarray(x))
if whole is not None:
    if not stopped:
        np.save(directory / "result.npy", np.concatenate(whole))
    say("stopped" if stopped else "done")
