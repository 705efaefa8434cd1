"""Long solves by hypre: `stopped_solve.py stop|endless|long`.

`stop`: rank 1 is stopped within a solve. `endless`: solves without end, for a host that is lost.
`long`: one solve takes longer than an operation may wait.
"""

import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp

import mpigrad as mg
from mpigrad.grid import Grid
from mpigrad.sparse import PCG, Matrix, Pattern, solve

jax.config.update("jax_enable_x64", True)
rank = mg.default_communicator().rank
endless = sys.argv[1] in ("stop", "endless")
n = 250 if endless else 400
grid = Grid((n, n), (1.0, 1.0))
pattern = Pattern.from_stencil(grid, [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])
fields = [jnp.full(grid.local_shape, 4.0 if k == 0 else -1.0) for k in range(5)]
matrix = Matrix.assemble(pattern, fields)
solver = PCG(rtol=1e-300, max_steps=1000)
run = mg.jit(lambda b: solve(matrix, b, solver, throw=False).value)
b = jnp.ones(pattern.n_local)
warm = PCG(rtol=1e-2)
solve(matrix, b, warm).value.block_until_ready()  # sets the hierarchy up
if endless:
    print("solves begin", flush=True)
if sys.argv[1] == "stop" and rank == 1:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
start = time.monotonic()
run(b).block_until_ready()
while endless:
    run(b).block_until_ready()
if rank == 0:
    print("seconds", time.monotonic() - start)
