"""An allreduce, and an acoustic wave with its gradient, on an older processor (under QEMU)."""

import jax.numpy as jnp
import numpy as np

import mpigrad as mg
from mpigrad.runtime.processor import processor_variant, waves_library
from mpigrad.waves import Survey
from mpigrad.waves.acoustic import Acoustic

comm = mg.default_communicator()
total = mg.allreduce(jnp.full(1000, comm.rank + 1.0, "float32"))
assert total[0] == comm.size * (comm.size + 1) / 2

grid = mg.Grid((24, 20), (10.0, 10.0), comm)
wave = Acoustic(grid, 1e-3, 8, pml=4, max_velocity=2500.0)
survey = Survey(np.array([[[120.0, 100.0]]]), np.array([[[120.0, 60.0]]]))


def misfit(velocity):
    wavelet = jnp.ones((1, 1, 8), "float32")
    return jnp.sum(wave.propagate(velocity, wavelet, survey).gathers ** 2)


velocity = jnp.full(grid.local_shape, 2000.0, "float32")
value, slope = mg.value_and_grad(misfit, loss="replicated")(velocity)
assert value > 0
assert np.isfinite(slope).all()
print(f"rank {comm.rank}: {processor_variant()}, {waves_library()}, {float(value):.6e}", flush=True)
