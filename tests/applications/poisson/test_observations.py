"""Observations: the same cells at any number of ranks, points, and every bad data file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad
from mpigrad.grid import Grid
from mpigrad_apps.poisson import draw_mask, observe_cells, observe_points, read_data, unit_square
from mpigrad_apps.poisson.observations import relative_noise

CELLS = (13, 11)


def test_mask_and_noise_are_the_same_at_any_number_of_ranks(comm, alone):
    grid, whole = unit_square(CELLS, comm), unit_square(CELLS, alone)
    assert np.array_equal(draw_mask(grid, 0.8, 4), draw_mask(whole, 0.8, 4)[grid.slices])
    assert np.array_equal(relative_noise(grid, 4), relative_noise(whole, 4)[grid.slices])
    assert not np.array_equal(draw_mask(whole, 0.8, 4), draw_mask(whole, 0.8, 5))


@pytest.mark.ranks(1)
def test_fraction_and_noise_have_their_distributions(alone):
    grid = unit_square((100, 100), alone)
    assert abs(np.mean(draw_mask(grid, 0.8, 0)) - 0.8) < 0.02
    noise = relative_noise(grid, 0)
    assert abs(np.mean(noise)) < 0.05
    assert abs(np.std(noise) - 1) < 0.05
    assert np.all(draw_mask(grid, 1.0, 0))


def test_no_observed_cell_is_an_error(comm):
    with pytest.raises(ValueError, match="no cell is observed"):
        draw_mask(unit_square((5, 5), comm), 1e-9, 0)


def test_loss_of_cells(comm):
    grid = unit_square(CELLS, comm)
    generator = np.random.default_rng(0)
    values, u = generator.uniform(1, 2, (2, *CELLS))
    mask = generator.random(CELLS) < 0.5
    seen = observe_cells(grid, mask, values, "relative")  # of the whole grid
    total = sum(comm.mpi.allgather(float(seen.loss(jnp.asarray(u[grid.slices])))))
    assert total == pytest.approx(np.mean((u[mask] / values[mask] - 1) ** 2), rel=1e-12)
    here = grid.slices
    seen = observe_cells(grid, mask[here], values[here], "absolute")  # of the tile
    total = sum(comm.mpi.allgather(float(seen.loss(jnp.asarray(u[here])))))
    expected = np.sum((u - values)[mask] ** 2) / np.sum(values[mask] ** 2)
    assert total == pytest.approx(expected, rel=1e-12)
    assert seen.count == np.sum(mask)


@pytest.mark.ranks(2)
def test_a_rank_without_observations_is_batched_and_differentiated(comm):
    """By JAX's own vmap and jvp: its loss, a zero, goes into the allreduce of all."""
    grid = unit_square((6, 4), comm)
    mask = np.zeros((6, 4), bool)
    mask[0, 1] = True  # on rank 0
    seen = observe_cells(grid, mask, np.full((6, 4), 2.0), "absolute")

    def loss(u):
        return mpigrad.allreduce(seen.loss(u), comm=comm)

    u = jnp.full(grid.local_shape, 3.0)
    np.testing.assert_allclose(jax.vmap(loss)(jnp.stack([u, 2 * u])), [1 / 4, 16 / 4])
    np.testing.assert_allclose(jax.jvp(loss, (u,), (u,))[1], 2 * 3 / 4)


def test_small_values_do_not_dominate_the_relative_loss(comm):
    values = np.ones((6, 6))
    values[0, 0] = 0.0
    grid = unit_square((6, 6), comm)
    seen = observe_cells(grid, np.ones((6, 6), bool), values)
    u = values + 1e-6
    total = sum(comm.mpi.allgather(float(seen.loss(jnp.asarray(u[grid.slices])))))
    assert total == pytest.approx((35 * 1e-12 + 1e-6) / 35, rel=1e-6)


@pytest.mark.parametrize("wrong", ["mask", "values"])
def test_rejects_wrong_mask_shapes_on_all_ranks(comm, wrong):
    grid = unit_square(CELLS, comm)
    mask, values = np.ones(CELLS, bool), np.ones(CELLS)
    if comm.rank == comm.size - 1:  # one rank's mistake
        mask, values = (mask[1:], values) if wrong == "mask" else (mask, values[:, 1:])
    with pytest.raises(ValueError, match="must both have the shape of the grid"):
        observe_cells(grid, mask, values)


def test_rejects_nan_in_observed_cells_only(comm):
    grid = unit_square(CELLS, comm)
    values, mask = np.ones(CELLS), np.ones(CELLS, bool)
    values[5, 5] = np.nan
    with pytest.raises(ValueError, match=r"must be finite, but 1 of \d+ are not"):
        observe_cells(grid, mask, values)
    mask[5, 5] = False
    assert observe_cells(grid, mask, values).count == mask.size - 1


def test_points_are_interpolated_between_centers(comm):
    """Bilinear interpolation is exact for a bilinear field, and zero on the boundary."""
    grid = unit_square(CELLS, comm)
    x, y = grid.centers()
    u = 1 + 2 * x - 3 * y + 4 * x * y
    inner = np.random.default_rng(1).uniform(0.1, 0.9, (40, 2))
    expected = 1 + 2 * inner[:, 0] - 3 * inner[:, 1] + 4 * inner[:, 0] * inner[:, 1]
    edge = np.array([[0.0, 0.4], [1.0, 0.7], [0.3, 0.0], [0.3, 1.0], [0.0, 0.0], [1.0, 1.0]])
    seen = observe_points(
        grid, np.concatenate([inner, edge]), np.concatenate([expected, np.zeros(6)])
    )
    predicted = np.asarray(mpigrad.jit(seen.predict)(jnp.asarray(u)))
    assert np.allclose(predicted, seen.values, rtol=1e-12, atol=1e-12)
    assert sum(comm.mpi.allgather(len(predicted))) == 46


def test_points_at_centers_are_their_cells(comm):
    grid = unit_square(CELLS, comm)
    x, y = np.meshgrid(*((np.arange(n) + 0.5) / n for n in CELLS), indexing="ij")
    whole = np.random.default_rng(2).normal(size=CELLS)
    seen = observe_points(grid, np.stack([x.ravel(), y.ravel()], 1), whole.ravel())
    predicted = mpigrad.jit(seen.predict)(jnp.asarray(whole[grid.slices]))
    assert np.allclose(predicted, seen.values, rtol=1e-9, atol=1e-9)


def test_points_are_differentiable(comm):
    grid = unit_square(CELLS, comm)
    points = np.random.default_rng(1).uniform(0, 1, (50, 2))
    seen = observe_points(grid, points, np.ones(50))
    mpigrad.dot_test(seen.predict, jnp.ones(grid.local_shape))


def good():
    return {
        "coordinates": np.array([[0.1, 0.2], [0.5, 0.6], [0.9, 1.0]]),
        "values": np.array([0.1, 0.2, 0.3]),
        "source": np.array(-1.0),
    }


def written(directory, comm, fields):
    path = directory / "data.npz"
    if comm.rank == 0:
        np.savez(path, **fields)
    comm.mpi.Barrier()
    return path


def test_data_file_is_read_on_every_rank(comm, directory):
    grid = unit_square(CELLS, comm)
    fields = {**good(), "source": np.full(CELLS, 2.0), "mask": np.array([True, False, True])}
    data = read_data(written(directory, comm, fields), grid)
    assert np.array_equal(data.values, [0.1, 0.3])
    assert np.array_equal(data.coordinates, fields["coordinates"][[0, 2]])
    assert data.source.shape == CELLS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": None}, "there is no field named values .found: coordinates, source"),
        ({"source": None, "coordinates": None}, "no field named coordinates or source"),
        ({"coordinates": np.ones((3, 3))}, r"coordinates must have shape \(k, 2\), got \(3, 3\)"),
        ({"coordinates": np.ones(2)}, r"shape \(k, 2\), got \(2,\)"),
        ({"values": np.ones(4)}, r"values must have shape \(3,\), one for .*, got \(4,\)"),
        (
            {"values": np.array(["a", "b", "c"])},
            "values must be an array of real numbers, got dtype <U1",
        ),
        (
            {"values": np.array([0.1, np.nan, 0.3])},
            "values must be finite, but 1 of 3 values are not",
        ),
        ({"source": np.array(np.inf)}, "source must be finite, but 1 of 1 values are not"),
        ({"source": np.ones((3, 3))}, r"source must be a number or .*, got shape \(3, 3\)"),
        ({"source": np.array(0.0)}, "the source is zero everywhere"),
        (
            {"coordinates": np.array([[0.1, 0.2], [0.5, 1.5], [0.9, 1.0]])},
            r"must lie in the unit square, but 1 of 3 do not. The first is \(0.5, 1.5\)",
        ),
        (
            {"coordinates": np.ones((0, 2)), "values": np.ones(0)},
            "expected at least one observation",
        ),
        ({"mask": np.array([True, False])}, r"got shape \(2,\) and dtype bool"),
        ({"mask": np.array([1, 0, 1])}, r"got shape \(3,\) and dtype int64"),
        ({"mask": np.zeros(3, bool)}, "expected at least one observation"),
        ({"values": np.array([{}, {}, {}])}, "cannot be read as an .npz file"),
    ],
)
def test_rejects_invalid_data_on_all_ranks(comm, directory, change, message):
    fields = {k: v for k, v in {**good(), **change}.items() if v is not None}
    path = written(directory, comm, fields)
    with pytest.raises(ValueError, match=message):
        read_data(path, unit_square(CELLS, comm))


def test_rejects_unreadable_files(comm, directory):
    grid = unit_square(CELLS, comm)
    with pytest.raises(FileNotFoundError):
        read_data(directory / "missing.npz", grid)
    if comm.rank == 0:
        (directory / "text.npz").write_text("coordinates 1 2 3")
    comm.mpi.Barrier()
    with pytest.raises(ValueError, match=r"cannot be read as an .npz file.*numpy\.savez"):
        read_data(directory / "text.npz", grid)


def test_rejects_observations_that_are_all_zero(comm):
    grid = Grid((4, 4), (0.25, 0.25), comm)
    with pytest.raises(ValueError, match="every observed value is zero"):
        observe_cells(grid, np.ones((4, 4), bool), np.zeros((4, 4)))
