"""The options of wave commands reach the propagators."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad.grid import Grid
from mpigrad.waves import Elastic, ElasticMedium, Survey, fit_relaxation
from mpigrad_apps.shots.elastic_command import run
from mpigrad_apps.shots.elastic_settings import Settings

SETTINGS = Settings(
    cells=(18, 14), spacing=(10.0, 10.0), steps=50, shots=1, receivers=4, pml=4, frequency=20.0,
    precision="float64", free_surface=True, quality=(40.0, 20.0), frames=0,
)  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.long("two programs with attenuation are compiled")
def test_a_free_surface_and_quality_factors(comm, directory):
    """The command has the gathers of a program that is written by hand."""
    whole = run(dataclasses.replace(SETTINGS, out=directory / "out"), comm).experiment
    with np.load(directory / "out" / "gathers.npz") as file:
        gathers = file["gathers"]
    with jax.enable_x64(True):
        relaxation = fit_relaxation(20.0, (whole.peak / 3, whole.peak * 3))
        grid = Grid(whole.shape, whole.spacing, comm)
        model = Elastic(
            grid, whole.dt, whole.steps, whole.peak, pml=4,
            free_surface="y0", relaxation=relaxation, reference=whole.peak,
        )  # fmt: skip
        tiles = (jnp.asarray(whole.fields[name][grid.slices]) for name in ("vp", "vs", "rho"))
        medium = ElasticMedium.from_velocities(*tiles)
        factors = (jnp.full(grid.local_shape, q) for q in SETTINGS.quality)
        medium = ElasticMedium(*medium[:3], *factors)
        survey = Survey(whole.sources, whole.receivers)
        expected = model.propagate(medium, jnp.asarray(whole.wavelets), survey).gathers
        stable = model.largest_time_step(medium)
    np.testing.assert_allclose(gathers, expected, rtol=0, atol=1e-11 * np.max(np.abs(expected)))
    with pytest.raises(ValueError, match=f"the largest stable one is {stable:.6g}"):
        run(dataclasses.replace(SETTINGS, dt=1.001 * stable, out=directory / "unstable"), comm)
