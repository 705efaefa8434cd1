"""A program written for mpi4jax. With the argument "tokens", for a version before 0.8."""

import sys

import jax
import jax.numpy as jnp
import mpi4jax
from mpi4py import MPI

comm = MPI.COMM_WORLD
if sys.argv[1:] == ["tokens"]:
    total, token = mpi4jax.allreduce(jnp.float32(comm.rank), MPI.SUM)
    total, token = mpi4jax.bcast(total, 0, token=token)
    gradient = jax.grad(lambda x: mpi4jax.allreduce(x, MPI.SUM)[0])(1.0)
else:
    total = mpi4jax.allreduce(jnp.float32(comm.rank), op=MPI.SUM, comm=comm)
    gradient = jax.grad(lambda x: mpi4jax.allreduce(x, MPI.SUM))(1.0)
if comm.rank == 0:
    print(f"gradient {gradient}")
    print(f"{mpi4jax.__name__} {mpi4jax.__version__}: {total}")
if sys.argv[1:] == ["internals"]:
    import mpi4jax._src.utils
