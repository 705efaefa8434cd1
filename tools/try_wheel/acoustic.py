"""The gradient of an acoustic misfit with respect to the velocity, checked by Taylor remainders."""

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg
from mpigrad.grid import Grid
from mpigrad.waves.acoustic import Acoustic, Survey

jax.config.update("jax_enable_x64", True)

grid = Grid((60, 40), (10.0, 10.0))
model = Acoustic(grid, dt=2e-3, steps=150)
survey = Survey(
    sources=np.array([[[120.0, 15.0]]]),
    receivers=np.array([[[x, 15.0] for x in range(20, 600, 20)]]),
)
phase = (np.pi * 15 * (np.arange(150) * 2e-3 - 0.08)) ** 2
wavelet = jnp.asarray((1 - 2 * phase) * np.exp(-phase))[None, None]
x, y = grid.centers()
slow = jnp.full(grid.local_shape, 1800.0)
observed = model.propagate(slow + 400.0 * (y > 200), wavelet, survey).gathers


def misfit(change):
    """Return the misfit of the gathers, the same on every rank."""
    return jnp.sum((model.propagate(slow + 100 * change, wavelet, survey).gathers - observed) ** 2)


result = mg.taylor_test(misfit, jnp.zeros(grid.local_shape), loss="replicated")
if MPI.COMM_WORLD.rank == 0:
    print(f"ok: rate {result.rates_with[-1]:.3f}")
