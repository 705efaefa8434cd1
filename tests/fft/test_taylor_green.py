"""The flow of examples/taylor_green.py: its energy in time, and its gradient."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad import fft

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "taylor_green.py"


@functools.cache
def example():
    spec = importlib.util.spec_from_file_location("taylor_green", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def history(n, reynolds, dt, steps):
    """Return the energy and the enstrophy before each step, and at the end."""
    flow = example().Flow(n, reynolds, dt)

    def step(u, _):
        return flow.step(u)[0], (flow.energy(u), flow.enstrophy(u))

    def run(velocity):
        u, both = jax.lax.scan(step, fft.forward(velocity, flow.layout), None, length=steps)
        return mg.allreduce((*both, flow.energy(u), flow.enstrophy(u)))

    energy, enstrophy, *last = map(np.asarray, mg.jit(run)(flow.start()))
    return np.append(energy, last[0]), np.append(enstrophy, last[1])


def dissipated(enstrophy, reynolds, dt):
    """Return the energy that viscosity takes until the end, by the trapezoidal rule."""
    rate = 2 * enstrophy / reynolds
    return dt * (np.sum(rate) - (rate[0] + rate[-1]) / 2)


def test_energy_is_lost_to_viscosity_alone():
    reynolds, dt, steps = 100.0, 0.05, 20
    energy, enstrophy = history(16, reynolds, dt, steps)
    np.testing.assert_allclose(energy[0], 1 / 8, rtol=1e-12)
    np.testing.assert_allclose(enstrophy[0], 3 / 8, rtol=1e-12)
    assert np.all(np.diff(energy) < 0)
    lost = energy[0] - energy[-1]
    np.testing.assert_allclose(lost, dissipated(enstrophy, reynolds, dt), rtol=1e-3)


@pytest.mark.full("150 steps on 32³ cells")
def test_the_largest_dissipation_at_reynolds_100():
    """On 48³ cells it is 0.01297 at t = 4.8 (bench/record/vortex-100-48.txt)."""
    reynolds, dt, steps = 100.0, 0.04, 150
    energy, enstrophy = history(32, reynolds, dt, steps)
    dissipation = 2 * enstrophy / reynolds
    largest = int(np.argmax(dissipation))
    np.testing.assert_allclose(dt * largest, 4.8, atol=0.1)
    np.testing.assert_allclose(dissipation[largest], 0.01297, rtol=5e-3)
    lost = energy[0] - energy[-1]
    np.testing.assert_allclose(lost, dissipated(enstrophy, reynolds, dt), rtol=2e-3)


def test_the_gradient_of_the_final_enstrophy_is_that_of_one_rank(alone):
    """And that of differences. The values are those of the program of the gradient."""

    def gradient(comm):
        flow = example().Flow(8, 100.0, 0.1, comm)
        x, y, z = flow.grid.centers()
        u = flow.start() + 0.1 * jnp.stack([jnp.sin(y + 2 * z), jnp.cos(z), jnp.sin(x - y)], -1)
        loss = lambda u: flow.final(u, 4)[0]
        program = mg.jit(mg.value_and_grad(loss))
        return flow, program, u, program(u)[1]

    flow, program, u, found = gradient(None)
    *_, whole = gradient(alone)
    expected = whole[flow.grid.slices]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(whole).max())
    v = jnp.asarray(np.random.default_rng(flow.grid.comm.rank).normal(size=u.shape))
    ends = [float(program(u + h * v)[0]) for h in (1e-4, -1e-4)]
    slope = float(mg.allreduce(jnp.vdot(found, v)))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-4, rtol=1e-6)
