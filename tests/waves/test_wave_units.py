"""Propagators and wavelets warn of numbers that look as if they had another unit."""

import contextlib
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad.grid import Grid
from mpigrad.waves import Acoustic, Elastic, ElasticMedium, Survey, ricker

SURVEY = Survey(np.array([[[55.0, 55.0]]]), np.array([[[205.0, 55.0]]]))


def expected(comm, warned: bool):
    """Expect a warning on rank 0, or none."""
    if warned and comm.rank == 0:
        return pytest.warns(UserWarning, match=r"smaller than the largest stable step.* up to 2 ")
    return contextlib.nullcontext()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("backend", ["native", "xla"])
@pytest.mark.parametrize("km", [True, False])
def test_velocities_in_km_per_s(comm, backend, km):
    grid = Grid((40, 30), (10.0, 10.0), comm)
    velocity = jnp.full(grid.local_shape, 2.0 if km else 2000.0)
    wavelet = jnp.asarray(ricker(15.0, 2e-3, 3))[None, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with expected(comm, km):
            model = Acoustic(grid, dt=2e-3, steps=3, pml=4, backend=backend)
            model.propagate(velocity, wavelet, SURVEY)
        with expected(comm, km):
            waves = Elastic(grid, dt=2e-3, steps=3, frequency=15.0, pml=4, backend=backend)
            density = jnp.full_like(velocity, 2000.0)
            medium = ElasticMedium.from_velocities(velocity, 0.5 * velocity, density)
            waves.propagate(medium, wavelet, SURVEY)


@pytest.mark.ranks(1)
def test_a_wavelet_above_the_nyquist_frequency():
    with pytest.warns(UserWarning, match=r"15 Hz cannot be sampled every 2.1 s.* at most 0.2381 "):
        ricker(15.0, 2.1, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ricker(15.0, 0.03, 3)
