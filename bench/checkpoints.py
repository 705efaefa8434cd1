"""Time against memory of the gradient of a long time loop, for each kind of checkpoints.

    mpigrad launch -n 1 bench/checkpoints.py

A nonlinear stencil (Gray and Scott's reaction, as in examples/reaction_diffusion.py) on the grid of
all ranks, float64. Memory is what XLA plans for the compiled gradient beside its operands and
results, on rank 0; times are the shortest of three, of the slowest rank.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad.grid import Grid, halo_exchange
from mpigrad.loops import Budget, scan

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--cells", type=int, default=200)
parser.add_argument("--steps", type=int, default=1000)
options = parser.parse_args()

grid = Grid((options.cells, options.cells), (1.0, 1.0))
comm, n = grid.comm, options.steps
state_size = 2 * 8 * grid.n_local / 1e6


def step(state, feed):
    p = halo_exchange(state, grid, boundary="edge")
    spread = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * state
    u, v = state[..., 0], state[..., 1]
    eaten = u * v**2
    growth = jnp.stack([feed * (1 - u) - eaten, eaten - (feed + 0.062) * v], axis=-1)
    return state + jnp.array([0.16, 0.08]) * spread + growth


def share(feed, first, checkpoints):
    after, _ = scan(lambda s, _: (step(s, feed), None), first, n, checkpoints=checkpoints)
    return jnp.sum(after[..., 1])


def seconds(f, *args):
    best = float("inf")
    jax.block_until_ready(f(*args))
    for _ in range(3):
        comm.mpi.Barrier()
        begun = time.perf_counter()
        jax.block_until_ready(f(*args))
        best = min(best, max(comm.mpi.allgather(time.perf_counter() - begun)))
    return best


generator = np.random.default_rng(comm.rank)
first = jnp.asarray(generator.uniform(0, 1, (*grid.local_shape, 2)) * [1, 0.3])
feed = jnp.full(grid.local_shape, 0.037)
forward = seconds(mpigrad.jit(lambda f: share(f, first, None)), feed)
if comm.rank == 0:
    print(
        f"{options.cells}² cells, {n} steps, {comm.size} ranks: a state takes {state_size:.2f} MB "
        "on each rank"
    )
    print(f"forward {forward:.2f} s\n")
    print(
        "| checkpoints | memory (MB) | (states) | gradient (s) | by forward |\n"
        "|---|---|---|---|---|"
    )
root = round(n**0.5)
for choice in (None, root, 4 * root, Budget(n), Budget(2 * root), Budget(root)):
    gradient = mpigrad.grad(lambda f, c=choice: share(f, first, c))
    memory = jax.jit(gradient).lower(feed).compile().memory_analysis().temp_size_in_bytes / 1e6
    spent = seconds(mpigrad.jit(gradient), feed)
    if comm.rank == 0:
        print(
            f"| `{choice}` | {memory:.1f} | {memory / state_size:.0f} | {spent:.2f} "
            f"| {spent / forward:.1f} |",
            flush=True,
        )
