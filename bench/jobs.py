"""A pool of ranks for many small jobs: speed, cost of a call, bytes that travel.

    mpigrad launch -n 2 bench/jobs.py

Each job integrates the Lorenz system (3 states) with 4 parameters of its own (the usual three and a
time scale) by classical Runge-Kutta and compares the states with its item. It computes value and
gradient in float64. A time is the shortest of several, on the slowest rank. On 1, 2, ... of the
ranks, the other ranks are idle. Bytes are the bytes that rank 0 hands to MPI in one call, next to
the bytes that a worker of `map_rect` sends: (1 + |params| + |item_params|) numbers for each output
of its jobs.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad
from mpigrad import jobs
from mpigrad.communicator import default_communicator
from mpigrad.runtime.native import record

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--jobs", type=int, default=1000)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--repeats", type=int, default=5)
options = parser.parse_args()


def slope(u, p):
    x, y, z = u
    return p[3] * jnp.stack([p[0] * (y - x), x * (p[1] - z) - y, x * y - p[2] * z])


def lorenz(params, item_params, item):
    """Misfit of the states at all times. params has the first state and the noise."""
    h = 1.0 / options.steps
    p = jnp.exp(item_params)

    def step(u, seen):
        a = slope(u, p)
        b = slope(u + h / 2 * a, p)
        c = slope(u + h / 2 * b, p)
        d = slope(u + h * c, p)
        u = u + h / 6 * (a + 2 * b + 2 * c + d)
        return u, jnp.sum((u - seen) ** 2)

    _, misfits = jax.lax.scan(step, params[:3], item)
    return jnp.sum(misfits) * jnp.exp(-params[3])


def nothing(params, item_params, item):
    return params[0] * item_params[0] * item


def seconds(f, comm, repeats):
    jax.block_until_ready(f())
    best = float("inf")
    for _ in range(repeats):
        comm.mpi.Barrier()
        begun = time.perf_counter()
        jax.block_until_ready(f())
        best = min(best, comm.mpi.allreduce(time.perf_counter() - begun, op=MPI.MAX))
    return best


def row(comm, title, call, repeats, serial):
    before = record().bytes
    jax.block_until_ready(call())
    sent = record().bytes - before
    spent = seconds(call, comm, repeats)
    if comm.rank == 0:
        faster = f"{serial[title] / spent:.2f}" if title in serial else "1"
        serial.setdefault(title, spent)
        theirs = 8 * options.jobs * (1 + 4 + 4) // comm.size if "gradient" in title else ""
        numbers = f"{1e3 * spent:.3f} | {faster} | {sent} | {theirs}"
        print(f"| {comm.size} | {title} | {numbers} |", flush=True)


world, serial = default_communicator(), {}
generator = np.random.default_rng(0)
every = [generator.standard_normal((options.steps, 3)) for _ in range(options.jobs)]
numbers = [float(i) for i in range(options.jobs)]
params = jnp.asarray([1.0, 1.0, 1.0, 0.1])
item_params = jnp.log(jnp.asarray([10.0, 28.0, 8 / 3, 1.0])) + 0.01 * jnp.asarray(
    generator.standard_normal((options.jobs, 4))
)
if world.rank == 0:
    print(f"{options.jobs} jobs of {options.steps} steps\n")
    print(
        "| ranks | what | ms | faster | bytes | of map_rect |\n|---|---|---|---|---|---|",
        flush=True,
    )
for size in range(1, world.size + 1):
    part = world.split(0 if world.rank < size else None)
    if part:
        pool = jobs.pool(part)
        for title, fn, items, schedule in (
            ("Lorenz, value and gradient", lorenz, every, jobs.Static()),
            ("Lorenz, dynamic schedule", lorenz, every, jobs.Dynamic()),
            ("empty jobs, value and gradient", nothing, numbers, jobs.Static()),
        ):
            f = pool.sum(fn, pool.put(items, schedule=schedule))
            program = mpigrad.jit(jax.value_and_grad(f, (0, 1)))
            row(
                part,
                title,
                functools.partial(program, params, item_params),
                options.repeats,
                serial,
            )
        if size == 1:
            stack = jnp.stack(every)
            plain = lambda s, m, stack=stack: jnp.sum(jax.vmap(lorenz, (None, 0, 0))(s, m, stack))
            program = jax.jit(jax.value_and_grad(plain, (0, 1)))
            call = functools.partial(program, params, item_params)
            row(part, "Lorenz, one vmap without a pool", call, options.repeats, serial)
        f = pool.sum(nothing, pool.put(numbers))
        row(part, "empty jobs, value", lambda f=f: f(params, item_params), options.repeats, serial)
        one = pool.sum(nothing, pool.put([1.0]))
        row(part, "one empty job", lambda f=one: f(params, item_params[:1]), 20, serial)
    world.mpi.Barrier()
