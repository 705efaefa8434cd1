"""Accuracy of acoustic waves: the analytic solution, reciprocity, absorption."""

import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad.grid import Grid
from mpigrad.waves.acoustic import Acoustic, Survey

SPEED = 2000.0


def ricker(t, frequency, delay):
    a = (np.pi * frequency * (t - delay)) ** 2
    return (1 - 2 * a) * np.exp(-a)


def gathers(comm, shape, h, dt, steps, sources, receivers, frequency=12.0, velocity=None, **more):
    grid = Grid(shape, (h, h), comm)
    wavelet = ricker(np.arange(steps) * dt, frequency, 1.2 / frequency)
    c = np.full(shape, SPEED) if velocity is None else velocity
    survey = Survey(np.array(sources, float)[:, None], np.array([receivers], float))
    acoustic = Acoustic(grid, dt, steps, **more)
    recording = acoustic.propagate(
        jnp.asarray(c[grid.slices]), jnp.asarray(wavelet)[None, None], survey
    )
    return np.asarray(recording.gathers)


def green(r, t, frequency):
    """u for (1/c^2) u_tt - u_xx - u_yy = ricker(t) delta: 1/(2 pi) int w(t - r/c cosh a) da."""
    late = np.maximum(t * SPEED / r, 1)
    a = np.linspace(0, 1, 2001)[:, None] * np.arccosh(late)
    values = ricker(t - r / SPEED * np.cosh(a), frequency, 1.2 / frequency)
    return np.trapezoid(values, a, axis=0) / (2 * np.pi)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("order", "power"), [
    (4, 2), pytest.param(8, 4, marks=pytest.mark.full("nine times as many steps"))
])  # fmt: skip
def test_convergence_to_the_analytic_solution(comm, order, power):
    errors = []
    for cells, h in ((60, 18.0), (180, 6.0)):
        # Cell centres of both grids; in time as fine as in space.
        dt = 2.5e-3 * (h / 18) ** power
        t = np.arange(round(0.38 / dt)) * dt
        source, receiver = (29.5 * 18, 29.5 * 18), (39.5 * 18, 34.5 * 18)
        u = gathers(comm, (cells, cells), h, dt, len(t), [source], [receiver], order=order)[0, 0]
        expected = green(np.hypot(10, 5) * 18, t, 12.0)
        errors.append(np.max(np.abs(u - expected)) / np.max(np.abs(expected)))
    rate = np.log(errors[0] / errors[1]) / np.log(3)
    assert rate > order - 0.3, (errors, rate)
    assert errors[1] < (2e-3 if order == 4 else 1e-5), errors


@pytest.mark.ranks(2, 3)
def test_reciprocity(comm):
    velocity = np.random.default_rng(1).uniform(1500, 2500, (30, 26))
    a, b = (61.0, 47.5), (233.3, 190.0)
    run = lambda s, r: gathers(comm, (30, 26), 10.0, 2e-3, 200, [s], [r], velocity=velocity, pml=8)[
        0, 0
    ]
    there, back = run(a, b), run(b, a)
    assert np.max(np.abs(there)) > 0
    np.testing.assert_allclose(there, back, rtol=0, atol=1e-12 * np.max(np.abs(there)))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("order", [4, 8])
def test_layers_absorb(comm, order):
    n, wide, h = 40, 110, 10.0
    dt, steps = 2.7e-3, 220
    depth = 10.5  # cells between the layer and a line of receivers; the source is on it
    source = (10.5, depth)
    receivers = np.array([(10.5, 5.5), (10.5 + 2 * depth, depth)])  # at 0 and 45 degrees
    near = gathers(comm, (n, n), h, dt, steps, [np.array(source) * h], receivers * h, order=order)
    shift = wide * h
    far = gathers(
        comm, (n + 2 * wide, n + 2 * wide), h, dt, steps,
        [np.array(source) * h + shift], receivers * h + shift, order=order,
    )  # fmt: skip
    decibel = 20 * np.log10(np.max(np.abs(near - far), axis=2) / np.max(np.abs(far), axis=2))[0]
    assert decibel[0] < -50, decibel
    assert decibel[1] < -40, decibel


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("order", "width"), [(4, 2), (4, 12), (8, 4), (8, 12)])
def test_the_largest_step_is_stable_for_long(comm, order, width):
    velocity = np.random.default_rng(2).uniform(1500, 3000, (24, 20))
    grid = Grid((24, 20), (10.0, 8.0), comm)
    dt = Acoustic(grid, 1e-4, 1, order=order).largest_time_step(jnp.asarray(velocity))
    acoustic = Acoustic(grid, dt, 6000, order=order, pml=((width, 0), (width, width)))
    wavelet = ricker(np.arange(6000) * dt, 25.0, 0.05)[None, None]
    survey = Survey(np.array([[[100.0, 80.0]]]), np.array([[[60.0, 50.0]]]))
    u = np.abs(acoustic.propagate(jnp.asarray(velocity), wavelet, survey).gathers[0, 0])
    assert np.max(u[-500:]) < 1e-2 * np.max(u)
