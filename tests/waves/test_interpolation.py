"""Interpolation between cell centres, damping profiles and the largest stable step."""

import numpy as np
import pytest

from mpigrad.grid import Grid
from mpigrad.waves.absorbing import WaveTile, damping, widths_of
from mpigrad.waves.arguments import wave_equation_limit
from mpigrad.waves.survey import point_table


@pytest.mark.ranks(1, 2, 3, 4)
def test_points_of_a_smooth_field(comm):
    grid = Grid((31, 26), (10.0, 8.0), comm)
    tile = WaveTile(grid, widths_of(((5, 4), (0, 6))))
    points = np.random.default_rng(0).uniform((60, 60), (250, 140), (40, 2))
    points[0] = (10 * 10.5, 8 * 12.5)
    table = point_table(points, tile)
    # A wave of six cells' length.
    f = lambda x, y: np.cos(2 * np.pi * (x / 60 + 0.3)) * np.sin(2 * np.pi * y / 48)
    i, j = np.unravel_index(table.cells, tile.shape)
    values = f((i + tile.origin[0] + 0.5) * 10.0, (j + tile.origin[1] + 0.5) * 8.0)
    mine = np.zeros(len(points))
    np.add.at(mine, table.points, table.weights * values)
    total = comm.mpi.allreduce(mine)
    np.testing.assert_allclose(total, f(*points.T), atol=3e-3)
    alone = table.weights[table.points == 0]
    assert comm.mpi.allreduce(alone.tolist()) == [1.0]


@pytest.mark.ranks(1)
def test_layers_begin_at_the_model_and_grow(comm):
    tile = WaveTile(Grid((6, 5), (10.0, 10.0), comm), widths_of(((3, 2), (0, 4))))
    assert tile.shape == (11, 9)
    assert tile.origin == (-3, 0)
    x, y = (damping(tile, axis, 2000.0, 1e-4) for axis in range(2))
    assert np.all(x[3:9] == 0) and np.all(x[:3] > 0) and np.all(x[9:] > 0)
    assert np.all(np.diff(x[:4]) < 0) and np.all(y[:5] == 0)
    top = 3 * 2000.0 * np.log(1e4) / (2 * 40.0)
    assert np.isclose(y[8], top * (3.5 / 4) ** 2)
    assert np.isclose(damping(tile, 1, 2000.0, 1e-4, offset=0.5)[8], top)


def test_the_largest_step_has_its_known_value(comm):
    grid = Grid((6, 5), (10.0, 10.0), comm)
    assert np.isclose(wave_equation_limit(grid, 8), 10 * np.sqrt(315 / 1024))
    assert np.isclose(wave_equation_limit(grid, 4), 10 * np.sqrt(3 / 8))
