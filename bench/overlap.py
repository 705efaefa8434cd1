"""A stencil that overlaps its halo exchange with the interior, beside one that does not.

    mpigrad launch -n 2 bench/overlap.py [--cells 1000] [--steps 10] [--pairs 15]

The five-point stencil in float32 on the grid of all ranks: `apply_stencil`; `halo_exchange` and the
stencil; and `jnp.pad` in the place of the exchange, which sends nothing. One step, and the
gradient through some of them. All are called in turn: printed are medians of the seconds of the
slowest rank, and of the ratios to `halo_exchange` within each turn, with quartiles.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import mpigrad
from mpigrad.grid import Grid, apply_stencil, halo_exchange

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--cells", type=int, default=1000)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--pairs", type=int, default=15)
options = parser.parse_args()

grid = Grid((options.cells, options.cells), (1.0, 1.0))
comm = grid.comm
u = jax.random.normal(jax.random.key(comm.rank), grid.local_shape, jnp.float32)
k = jnp.full(grid.local_shape, 0.1, jnp.float32)


def diffused(p, k):
    middle = p[1:-1, 1:-1]
    return middle + k * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * middle)


WAYS = {
    "halo_exchange": lambda u, k: diffused(halo_exchange(u, grid), k),
    "apply_stencil": lambda u, k: apply_stencil(diffused, u, grid, coefficients=(k,)),
    "no message": lambda u, k: diffused(jnp.pad(u, 1), k),
}


def after(way, u, k):
    for _ in range(options.steps):
        u = way(u, k)
    return jnp.sum(u**2)


PROGRAMS = {
    "one step": {name: mpigrad.jit(way) for name, way in WAYS.items()},
    f"gradient through {options.steps}": {
        name: mpigrad.jit(mpigrad.grad(lambda u, k, way=way: after(way, u, k), argnums=(0, 1)))
        for name, way in WAYS.items()
    },
}


def seconds(program):
    comm.mpi.Barrier()
    begun = time.perf_counter()
    jax.block_until_ready(program(u, k))
    return max(comm.mpi.allgather(time.perf_counter() - begun))


for what, programs in PROGRAMS.items():
    for program in programs.values():
        seconds(program)
    turns = [{name: seconds(p) for name, p in programs.items()} for _ in range(options.pairs)]
    for name in programs:
        ratios = [turn[name] / turn["halo_exchange"] for turn in turns]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(turn[name] for turn in turns)
        if comm.rank == 0:
            spread = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            print(f"{what:22} {name:14} {1e3 * median:8.2f} ms  {spread}", flush=True)
