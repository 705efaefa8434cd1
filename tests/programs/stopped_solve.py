"""Solves by hypre without end. After a second, rank 1 is stopped: within a solve, nearly always.

stopped_solve.py stop|long: `long` is one solve that takes longer than any operation may wait.
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
what = sys.argv[1]
n = 40 if what == "stop" else 250
grid = Grid((n, n), (1.0, 1.0))
pattern = Pattern.from_stencil(grid, [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])
fields = [jnp.full(grid.local_shape, 4.0 if k == 0 else -1.0) for k in range(5)]
matrix = Matrix.assemble(pattern, fields)
b = jnp.ones(pattern.n_local)
if what == "long":
    start = time.monotonic()
    solution = solve(matrix, b, PCG(rtol=1e-300, max_steps=400), throw=False)
    jax.block_until_ready(solution.value)
    if rank == 0:
        print("seconds", time.monotonic() - start)
else:
    if rank == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    while True:
        solve(matrix, b, PCG(rtol=1e-12)).value.block_until_ready()
