"""Accuracy of elastic waves: plane waves and absorbing layers."""

import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad.grid import Grid
from mpigrad.waves.elastic import Elastic, ElasticMedium, State, Survey, lame

VP, VS, RHO = 2500.0, 1400.0, 2100.0


def homogeneous(grid):
    lam, mu = lame(VP, VS, RHO)
    return tuple(jnp.full(grid.local_shape, x) for x in (lam, mu, RHO))


def plane_wave_error(comm, refinement, shear):
    """The largest error of a pulse along x, in the middle, where no side is felt yet."""
    h, steps = 10.0 / refinement, 20 * refinement**2
    dt, c = 1e-3 / refinement**2, VS if shear else VP
    grid = Grid((60 * refinement, 30 * refinement), (h, h), comm)
    # On a point of vy or vx, so that nothing is interpolated.
    point = np.array([330.0 + h / 2, 150.0] if shear else [330.0, 150.0 + h / 2])
    survey = Survey(np.full((1, 1, 2), 99.0), point[None, None])
    component = ("vy",) if shear else ("vx",)
    elastic = Elastic(
        grid, dt, steps, 10.0, pml=0, components=component,
    )  # fmt: skip
    x, _ = grid.centers()
    lam, mu = lame(VP, VS, RHO)

    def pulse(x, t):
        return np.exp(-(((x - 300.0 - c * t) / 50.0) ** 2))

    zero = np.zeros((1, *x.shape))
    stress = -RHO * c * pulse(x, 0)[None]
    later = -RHO * c * pulse(x + h / 2, 0)[None]
    state = State(
        vx=zero if shear else pulse(x + h / 2, -dt / 2)[None],
        vy=pulse(x, -dt / 2)[None] if shear else zero,
        sxx=zero if shear else stress,
        syy=zero if shear else lam / (lam + 2 * mu) * stress,
        sxy=later if shear else zero,
        memory_x=np.zeros((1, 4, 0, x.shape[1])),
        memory_y=np.zeros((1, 4, x.shape[0], 0)),
    )
    state = State(*(jnp.asarray(x) for x in state))
    wavelets = jnp.zeros((1, 1, steps))
    got = elastic.propagate(ElasticMedium(*homogeneous(grid)), wavelets, survey, state).gathers[
        0, 0, 0
    ]
    times = (np.arange(steps) - 0.5) * dt
    return float(np.max(np.abs(np.asarray(got) - pulse(point[0], times))))


@pytest.mark.full("it refines the grid and takes long")
@pytest.mark.ranks(1)
@pytest.mark.parametrize("shear", [False, True], ids=["P", "S"])
def test_plane_waves_have_the_right_speed(comm, shear):
    """Fourth order in h, with dt proportional to h squared."""
    coarse, fine = (plane_wave_error(comm, n, shear) for n in (1, 2))
    assert fine < 1e-3
    assert np.log2(coarse / fine) > 3.7


@pytest.mark.full("it needs a large domain and takes long")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("source", ["explosive", "force_x", "force_y"])
def test_layers_absorb(comm, source):
    """At right angles and at 45 degrees, against a model so large that nothing returns."""
    h, dt, steps, cells, more = 10.0, 2e-3, 260, 60, 56
    f0 = 10.0
    t = np.arange(steps) * dt - 1.2 / f0
    ricker = (1 - 2 * (np.pi * f0 * t) ** 2) * np.exp(-((np.pi * f0 * t) ** 2))
    wavelets = jnp.asarray(1e6 * ricker[None, None])
    gathers = []
    for extra in (0, more):
        size, shift = cells + 2 * extra, extra * h
        grid = Grid((size, size), (h, h), comm)
        # 25 cells from the layer; receivers at its edge, straight ahead and at 45 degrees.
        place = np.array([255.0, 305.0])
        points = np.array([[5.0, 305.0], [5.0, 55.0], [5.0, 555.0]])
        survey = Survey((place + shift)[None, None], (points + shift)[None])
        elastic = Elastic(grid, dt, steps, f0, source=source, max_velocity=VP)
        gathers.append(
            np.asarray(
                elastic.propagate(ElasticMedium(*homogeneous(grid)), wavelets, survey).gathers[0]
            )
        )
    small, large = gathers

    def decibels(receiver):
        reflected, incident = (np.max(np.hypot(*g[:, receiver])) for g in (small - large, large))
        return 20 * np.log10(reflected / incident)

    print(source, [round(float(decibels(k)), 1) for k in range(3)])
    assert decibels(0) < -50
    assert decibels(1) < -40
    assert decibels(2) < -40
