"""Messages of all kinds, a sparse product and a solve: value and gradient, to be compared.

staged.py DIRECTORY: each rank writes what it got to DIRECTORY, and what the stand-in for the driver
(driver.c) has copied, if MPIGRAD_GPU_LIBRARY names it.
"""

import ctypes
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg
from mpigrad import sparse
from mpigrad.extend import keep_in_order
from mpigrad.grid import Grid, halo_exchange

jax.config.update("jax_enable_x64", True)
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
if rank == 1:
    os.environ["STAND_IN_WITHOUT_PINNED_MEMORY"] = "1"  # plain memory serves, too
after, before = (rank + 1) % size, (rank - 1) % size
out = pathlib.Path(sys.argv[1])


def shifted(x, comm, step):
    return comm.sendrecv(x, (comm.rank + step) % comm.size, source=(comm.rank - step) % comm.size)


shift = mg.custom_operation(
    lambda x, comm: 3 * shifted(x, comm, 1), lambda ct, comm: 3 * shifted(ct, comm, -1)
)
grid = Grid((7, 6), (1.0, 1.0))
pattern = sparse.Pattern.from_stencil(grid, [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])


def loss(u):
    p = halo_exchange(u, grid, width=1, boundary="edge")
    laplacian = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u
    x = u[0, :3] + jnp.sum(laplacian)
    x = x + mg.allreduce(jnp.sin(x)) + mg.allreduce(x, MPI.MAX)
    x = x + mg.sendrecv(x, after, before) * mg.scan(x)
    x = keep_in_order(x + jnp.sum(mg.gather(x)))
    requests = [mg.irecv(x, before, tag=5), mg.isend(x, after, tag=5)]
    x = x + mg.waitall(requests)[0] + shift(x)
    if rank == 0:
        for other in range(1, size):
            mg.send(x, other)
    else:
        x = x + mg.recv(x, MPI.ANY_SOURCE)
    nothing = mg.allreduce(jnp.zeros((0, 2)))
    ones = jnp.ones_like(u)
    A = sparse.Matrix.assemble(pattern, [5 + u**2, -ones, -ones, -ones, -ones])
    y = sparse.solve(A, A @ jnp.sin(u).ravel() + jnp.sin(x[0])).value
    return jnp.sum(jnp.cos(x)) + jnp.sum(y**2) + jnp.sum(nothing)


u = jnp.linspace(0.1, 1.0, grid.n_local).reshape(grid.local_shape) * (1 + rank)
value, gradient = mg.jit(mg.value_and_grad(loss))(u)
moved = [mg.bcast(jnp.arange(3).astype(t) + rank) for t in ("bfloat16", "uint8", "complex64")]
arrays = [value, gradient, moved[0].astype("float32"), *moved[1:]]
np.savez(out / f"{rank}.npz", *map(np.asarray, arrays))

if path := os.environ.get("MPIGRAD_GPU_LIBRARY"):
    driver = ctypes.CDLL(path)
    copies, copied = (
        (ctypes.c_longlong * 3).in_dll(driver, f"stand_in_{x}") for x in ("copies", "bytes")
    )
    blocks = {
        name: ctypes.c_longlong.in_dll(driver, f"stand_in_{name}").value
        for name in ("pinned", "allocated", "records", "waits")
    }
    found = {"copies": [*copies], **blocks}

    def copied_by(function):
        before = [*copied]
        function()
        return [new - old for new, old in zip(copied, before, strict=True)]

    ones = jnp.ones(1000)
    found["allreduce"] = copied_by(lambda: mg.allreduce(ones))
    found["sendrecv"] = copied_by(lambda: mg.sendrecv(ones, after, before))
    ctypes.c_int.in_dll(driver, "stand_in_fails").value = 1
    try:
        mg.bcast(ones)
    except jax.errors.JaxRuntimeError as error:
        found["error"] = str(error)
    (out / f"{rank}.json").write_text(json.dumps(found))
