"""Time against memory of the gradient of a long time loop, for each kind of checkpoints.

    mpigrad launch -n 1 bench/checkpoints.py

A nonlinear stencil (Gray and Scott's reaction, as in examples/reaction_diffusion.py) on the grid of
all ranks, float64. Memory is what XLA plans for the compiled gradient beside its operands and
results, on rank 0; times are the shortest of three, of the slowest rank.

    mpigrad launch -n 1 bench/checkpoints.py --volume 128 --steps 100 --directory /scratch

The wave equation on three axes in float32 (an equation of one's own, leapfrog, seven points), with
the state before each step in memory, and with a state every 20 steps in a file.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad.grid import Grid, halo_exchange
from mpigrad.loops import Budget, Files, scan

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--cells", type=int, default=200)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--volume", type=int, help="cells along each of three axes")
parser.add_argument("--directory", help="of files of states")
options = parser.parse_args()

shape = (options.volume,) * 3 if options.volume else (options.cells,) * 2
grid = Grid(shape, (1.0,) * len(shape))
comm, n = grid.comm, options.steps
state_size = 2 * (4 if options.volume else 8) * grid.n_local / 1e6


def wave(state, speed):
    u, before = state
    p = halo_exchange(u, grid)
    inner = slice(1, -1)
    around = p[2:, inner, inner] + p[:-2, inner, inner] + p[inner, 2:, inner]
    around = around + p[inner, :-2, inner] + p[inner, inner, 2:] + p[inner, inner, :-2]
    return 2 * u - before + speed * (around - 6 * u), u


def reaction(state, feed):
    p = halo_exchange(state, grid, boundary="edge")
    spread = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * state
    u, v = state[..., 0], state[..., 1]
    eaten = u * v**2
    growth = jnp.stack([feed * (1 - u) - eaten, eaten - (feed + 0.062) * v], axis=-1)
    return state + jnp.array([0.16, 0.08]) * spread + growth


step = wave if options.volume else reaction


def share(feed, first, checkpoints):
    after, _ = scan(lambda s, _: (step(s, feed), None), first, n, checkpoints=checkpoints)
    return jnp.sum(after[0] ** 2) if options.volume else jnp.sum(after[..., 1])


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
if options.volume:
    first, feed = (first[..., 0].astype("float32"),) * 2, feed.astype("float32")
forward = seconds(mpigrad.jit(lambda f: share(f, first, None)), feed)
if comm.rank == 0:
    print(
        f"{' x '.join(map(str, shape))} cells, {n} steps, {comm.size} ranks: a state takes "
        f"{state_size:.2f} MB on each rank"
    )
    print(f"forward {forward:.2f} s\n")
    print(
        "| checkpoints | memory (MB) | (states) | gradient (s) | by forward |\n"
        "|---|---|---|---|---|"
    )
root = round(n**0.5)
choices = [None, root, 4 * root, Budget(n), Budget(2 * root), Budget(root)]
if options.volume:
    choices = [1, 20]
if options.directory:
    choices += [Files(options.directory, 20 if options.volume else root, None)]
for choice in choices:
    gradient = mpigrad.grad(lambda f, c=choice: share(f, first, c))
    memory = jax.jit(gradient).lower(feed).compile().memory_analysis().temp_size_in_bytes / 1e6
    spent = seconds(mpigrad.jit(gradient), feed)
    if comm.rank == 0:
        print(
            f"| `{choice}` | {memory:.1f} | {memory / state_size:.0f} | {spent:.2f} "
            f"| {spent / forward:.1f} |",
            flush=True,
        )
