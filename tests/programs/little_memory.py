"""A rank without memory for the copy of its message: an error with its line, and it goes on."""

import pathlib
import resource

import jax.numpy as jnp

import mpigrad as mg

comm = mg.default_communicator()
x = jnp.ones(2**28, "uint8")
pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**27, limits[1]))
try:
    mg.isend(x, 1 - comm.rank)
except Exception as error:
    print(f"{error}\n", end="", flush=True)
resource.setrlimit(resource.RLIMIT_AS, limits)
print(f"sum {float(mg.allreduce(1.0))}\n", end="", flush=True)
