"""The gradient of examples/particle_mesh.py against a program for one process, in plain JAX."""

import functools
import importlib.util
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad.grid import rank_at_position

COMM = mg.default_communicator()
EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "particle_mesh.py"
CELLS = [(9, 8), (5, 6, 4)]


@functools.cache
def example():
    spec = importlib.util.spec_from_file_location("particle_mesh", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the same in plain JAX: no mpigrad, no ranks ----


def corners(x, cells):
    low = jnp.floor(x - 0.5)
    part = x - 0.5 - low
    for step in itertools.product((0, 1), repeat=len(cells)):
        index = (low.astype(int) + np.array(step)) % np.array(cells)
        yield tuple(index.T), jnp.prod(jnp.where(np.array(step), part, 1 - part), axis=1)


def spread(x, mass, cells):
    density = jnp.zeros(cells)
    for at, weight in corners(x, cells):
        density = density.at[at].add(weight * mass)
    return density


def forces(density):
    """The field whose divergence is 1 minus the density, as gradient of a potential."""
    cells, axes = density.shape, density.ndim
    k = [2 * np.pi * np.fft.fftfreq(n) for n in cells[:-1]] + [
        2 * np.pi * np.fft.rfftfreq(cells[-1])
    ]
    k = np.meshgrid(*k, indexing="ij")
    k2 = sum(part**2 for part in k)
    potential = -jnp.fft.rfftn(density) / np.where(k2 == 0, np.inf, k2)
    parts = [np.where(np.abs(part) > np.pi - 1e-9, 0, part) for part in k]  # the highest mode
    return jnp.stack(
        [-jnp.fft.irfftn(1j * part * potential, cells, axes=tuple(range(axes))) for part in parts],
        axis=-1,
    )


def plain(contrast, steps, dt):
    """Return the clumping, and the positions before each step."""
    cells = contrast.shape
    x = jnp.stack(jnp.meshgrid(*(jnp.arange(n) + 0.5 for n in cells), indexing="ij"), axis=-1)
    x = x.reshape(-1, len(cells))
    v, mass = jnp.zeros_like(x), 1 + contrast.reshape(-1)

    def step(state, _):
        x, v = state
        field = forces(spread(x, mass, cells))
        v = v + dt * sum(weight[:, None] * field[at] for at, weight in corners(x, cells))
        return ((x + dt * v) % np.array(cells), v), x

    (x, _), positions = jax.lax.scan(step, (x, v), None, length=steps)
    return jnp.sum(spread(x, mass, cells) ** 2), positions


@pytest.mark.cases("cells0", reason="three axes run the same code")
@pytest.mark.parametrize("cells", CELLS)
def test_the_gradient_is_that_of_plain_jax(cells):
    program = example()
    grid = mg.Grid(cells, (1.0,) * len(cells), periodic=True)
    whole = 0.3 * np.random.default_rng(0).normal(size=cells)
    contrast = program.initial_contrast(grid)
    np.testing.assert_array_equal(contrast, whole[grid.slices])
    reference = None
    if COMM.rank == 0:
        function = jax.value_and_grad(lambda c: plain(c, program.steps, program.dt), has_aux=True)
        reference = jax.device_get(jax.jit(function)(jnp.asarray(whole)))
    (value, positions), gradient = COMM.mpi.bcast(reference)
    if COMM.size > 1:  # particles do move between ranks
        owners = np.asarray(rank_at_position(positions, grid))
        assert np.any(owners[1:] != owners[:-1])
    found, mine = mg.jit(mg.value_and_grad(lambda c: program.clumping(c, grid)))(contrast)
    np.testing.assert_allclose(found, value, rtol=1e-12)
    scale = np.abs(gradient).max()
    np.testing.assert_allclose(mine, gradient[grid.slices], rtol=0, atol=1e-10 * scale)


@pytest.mark.full("the gradient is compared with that of plain JAX")
@pytest.mark.parametrize("cells", CELLS)
def test_taylor(cells):
    program = example()
    grid = mg.Grid(cells, (1.0,) * len(cells), periodic=True)
    loss = mg.jit(lambda c: program.clumping(c, grid))
    mg.taylor_test(loss, program.initial_contrast(grid), step=1e-5, halvings=3)
