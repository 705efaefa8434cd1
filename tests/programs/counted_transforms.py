"""Count the messages of transforms of a shape, in layouts such as 3,1,1 (tiles along each axis)."""

import json
import sys

import jax
import jax.numpy as jnp
from mpi_monitor import counted

import mpigrad as mg
from mpigrad import fft

jax.config.update("jax_enable_x64", True)
world = mg.default_communicator()
shape, *layouts = (tuple(map(int, word.split(","))) for word in sys.argv[1:])

for dims in layouts:
    grid = mg.Grid(shape, (1.0,) * len(shape), dims=dims, periodic=True)
    u = jnp.ones(grid.local_shape)
    share = lambda u, g=grid: jnp.sum(jnp.abs(fft.rfftn(u, g)) ** 2)
    programs = {
        "value": mg.jit(lambda u, g=grid: fft.rfftn(u, g)),
        "value and adjoint": mg.jit(jax.grad(share)),
        "two fields": mg.jit(lambda u, g=grid: fft.rfftn([u, 2 * u], g)),
    }
    for name, program in programs.items():
        program(u)
        world.mpi.Barrier()
        before = counted()
        jax.block_until_ready(program(u))
        sent = [b - a for a, b in zip(before, counted(), strict=True)]
        world.mpi.Barrier()
        rows = world.mpi.gather(sent)
        if world.rank == 0:
            print("RESULT", json.dumps([dims, name, rows]), flush=True)
