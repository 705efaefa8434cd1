"""`gradients.py FILE`: a Poisson problem's gradient and an acoustic one, written by rank 0."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad import sparse
from mpigrad.communicator import default_communicator
from mpigrad.grid import Grid
from mpigrad.waves.acoustic import Acoustic, Survey
from mpigrad_apps.poisson import poisson, unit_square

jax.config.update("jax_enable_x64", True)


def of_poisson():
    """Return the gradient of |u|² with respect to the diffusivity of each cell."""
    grid = unit_square((24, 20))
    x, y = grid.centers()
    model = poisson(grid, np.ones(grid.local_shape))
    solver = sparse.default_solver(rtol=1e-12)
    energy = lambda kappa: jnp.sum(model.solution(kappa, solver) ** 2)
    gradient = mpigrad.jit(mpigrad.grad(energy))
    return grid.gather(gradient(jnp.asarray(1 + x**2 + y**2)))


def of_waves():
    """Return the gradient of the energy at the receivers with respect to the velocity."""
    grid = Grid((36, 28), (10.0, 10.0))
    survey = Survey(
        sources=np.array([[[125.0, 15.0]]]),
        receivers=np.array([[[x, 15.0] for x in range(20, 360, 20)]]),
    )
    model = Acoustic(grid, dt=1e-3, steps=120)
    time = np.arange(120) * 1e-3
    wavelet = jnp.asarray(np.sin(2 * np.pi * 20 * time) * np.exp(-((time / 0.04) ** 2)))[None, None]
    x, y = grid.centers()
    velocity = jnp.asarray(1800.0 + 300.0 * (y > 120) + 0 * x)

    def energy(velocity):
        return jnp.sum(model.propagate(velocity, wavelet, survey).gathers ** 2)

    value_and_grad = mpigrad.jit(mpigrad.value_and_grad(energy, loss="replicated"))
    return grid.gather(value_and_grad(velocity)[1])


poissons, waves = of_poisson(), of_waves()
if default_communicator().rank == 0:
    np.savez(sys.argv[1], poisson=poissons, waves=waves)
