"""An allreduce, a shared sum and a wave with its gradient, on all ranks."""

import jax.numpy as jnp

import mpigrad as mg
from mpigrad.runtime.processor import processor_variant, waves_library

comm = mg.default_communicator()
total = mg.allreduce(jnp.full(1000, comm.rank + 1.0))
assert total[0] == comm.size * (comm.size + 1) / 2

print(f"rank {comm.rank}", processor_variant(), waves_library(), flush=True)
