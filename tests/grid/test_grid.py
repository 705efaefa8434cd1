"""Grids: tiles, their numbering, and moving whole fields."""

import itertools

import numpy as np
import pytest

import mpigrad
from mpigrad.grid import Grid
from mpigrad.grid.grid import choose_dims

COMM = mpigrad.default_communicator()


@pytest.fixture(params=[(12, 12), (13, 7), (5, 9), (31, 4), (17,), (6, 5, 7), (4, 9, 4)], ids=str)
def grid(request):
    return Grid(request.param, (0.5, 0.25, 2.0)[: len(request.param)])


def test_tiles_cover_the_grid_once(grid):
    owners = np.zeros(grid.shape, int)
    for rank in range(COMM.size):
        owners[grid.slices_of(rank)] += 1
    assert np.all(owners == 1)
    sizes = [np.diff(grid.starts(axis)) for axis in range(grid.ndim)]
    assert all(s.max() - s.min() <= 1 and s.min() >= 1 for s in sizes)


def test_rows_number_each_rank_contiguously(grid):
    everyone = COMM.mpi.allgather((grid.row_offset, grid.local_rows()))
    start = 0
    for offset, rows in everyone:
        assert offset == start
        assert np.array_equal(rows.ravel(), start + np.arange(rows.size))
        start += rows.size
    assert start == grid.size == grid.row_offsets[-1]


def test_rows_of_any_cell_agree_with_their_owner(grid):
    everywhere = grid.rows(*np.meshgrid(*(np.arange(n) for n in grid.shape), indexing="ij"))
    assert np.array_equal(everywhere[grid.slices], grid.local_rows())
    padded = np.pad(everywhere, 1, constant_values=-1)
    around = tuple(slice(part.start, part.stop + 2) for part in grid.slices)
    assert np.array_equal(grid.local_rows(1), padded[around])
    assert sorted(everywhere.ravel()) == list(range(grid.size))


def test_neighbors_are_mutual(grid):
    mine = {n.rank: n.step for n in grid.neighbors}
    for rank, theirs in enumerate(COMM.mpi.allgather(mine)):
        if rank in mine:
            assert theirs[COMM.rank] == tuple(-s for s in mine[rank])
        else:
            assert COMM.rank not in theirs


def test_neighbors_are_all_tiles_that_touch(grid):
    def touches(rank):
        pairs = zip(grid.slices, grid.slices_of(rank), strict=True)
        return all(a.start <= b.stop and b.start <= a.stop for a, b in pairs)

    others = [rank for rank in range(COMM.size) if rank != COMM.rank and touches(rank)]
    assert sorted(neighbor.rank for neighbor in grid.neighbors) == others


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.thin(4)
def test_periodic_axes_wrap_around():
    grid = Grid((7, 5), (1.0, 1.0), periodic=(True, False))
    along, across = grid.dims
    for neighbor in grid.neighbors:
        x, y = (p + s for p, s in zip(grid.coords, neighbor.step, strict=True))
        assert grid.coords_of(neighbor.rank) == (x % along, y)
    inside = [y for y in (-1, 0, 1) if 0 <= grid.coords[1] + y < across]
    assert len(grid.neighbors) == 3 * len(inside) - 1
    mine = sorted((grid.comm.rank, n.rank, n.step) for n in grid.neighbors)
    everyone = [*itertools.chain(*COMM.mpi.allgather(mine))]
    mirrored = [(b, a, tuple(-s for s in step)) for a, b, step in everyone]
    assert sorted(everyone) == sorted(mirrored)
    whole = grid.rows(*np.meshgrid(np.arange(7), np.arange(5), indexing="ij"))
    around = np.pad(np.pad(whole, ((2, 2), (0, 0)), "wrap"), ((0, 0), (2, 2)), constant_values=-1)
    part = tuple(slice(s.start, s.stop + 4) for s in grid.slices)
    assert np.array_equal(grid.local_rows(2), around[part])
    with pytest.raises(TypeError, match="periodic must be True or False"):
        Grid((7, 5), (1.0, 1.0), periodic=(True,))


def test_gather_and_scatter_are_inverse(grid):
    whole = np.random.default_rng(0).normal(size=(*grid.shape, 2))
    local = grid.scatter(whole if COMM.rank == 0 else None)
    assert np.array_equal(local, whole[grid.slices])
    for stride in (1, 2, 3):
        back = grid.gather(local, stride)
        assert (back is None) == (COMM.rank != 0)
        if back is not None:
            assert np.array_equal(back, whole[(slice(None, None, stride),) * grid.ndim])


def test_centers_and_natural_ids(grid):
    for axis, x in enumerate(grid.centers()):
        part, h = grid.slices[axis], grid.spacing[axis]
        expected = (np.arange(part.start, part.stop) + 0.5) * h
        assert x.shape == grid.local_shape
        assert np.array_equal(np.moveaxis(x, axis, 0)[:, *[0] * (grid.ndim - 1)], expected)
        assert all(np.ptp(x, axis=other).max() == 0 for other in range(grid.ndim) if other != axis)
    ids = np.arange(grid.size).reshape(grid.shape)
    assert np.array_equal(grid.natural_ids(), ids[grid.slices])


@pytest.mark.parametrize(
    ("shape", "ranks", "dims"),
    [
        ((300, 300), 4, (2, 2)),
        ((300, 300), 9, (3, 3)),
        ((300, 300), 2, (2, 1)),
        ((300, 300), 6, (3, 2)),
        ((10, 1000), 4, (1, 4)),
        ((1000, 10), 4, (4, 1)),
        ((3, 100), 7, (1, 7)),
        ((600, 300), 8, (4, 2)),
        ((12,), 5, (5,)),
        ((64, 64, 64), 8, (2, 2, 2)),
        ((64, 64, 64), 4, (2, 2, 1)),
        ((64, 64, 64), 2, (2, 1, 1)),
        ((10, 10, 1000), 4, (1, 1, 4)),
        ((2, 100, 100), 12, (1, 4, 3)),
    ],
)
def test_dims_follow_the_shape(shape, ranks, dims):
    assert choose_dims(shape, ranks) == dims


def test_more_ranks_than_cells():
    with pytest.raises(ValueError, match=r"5 ranks cannot share 4 x 4 cells.*at most 4 ranks"):
        choose_dims((4, 4), 5)
    with pytest.raises(ValueError, match="17 ranks cannot share"):
        choose_dims((4, 4), 17)
    with pytest.raises(ValueError, match=r"11 ranks cannot share 3 x 3 x 3 cells.*at most 9 ranks"):
        choose_dims((3, 3, 3), 11)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((0, 3), (1.0, 1.0)), ValueError, "0 x 3"),
        (((3, 3), (1.0, -1.0)), ValueError, "positive and finite"),
        (((3, 3), (1.0, float("nan"))), ValueError, "positive and finite"),
        (((3,), (1.0, 1.0)), TypeError, "spacing as many"),
        (((), ()), TypeError, "one to three integers"),
        (((3,) * 4, (1.0,) * 4), TypeError, "one to three integers"),
        (((3.5, 3), (1.0, 1.0)), TypeError, "one to three integers"),
        (((30, 30), (1.0, 1.0), {"dims": (1,)}), TypeError, "dims must be 2 integers"),
        (((30, 30), (1.0, 1.0), {"dims": (5, 7)}), ValueError, "35 tiles, for"),
        (((30, 30), (1.0, 1.0), {"dims": (-1, -1)}), ValueError, "one tile per rank"),
    ],
)
def test_bad_grids_are_refused_on_every_rank(arguments, error, message):
    shape, spacing, *settings = arguments
    with pytest.raises(error, match=message):
        Grid(shape, spacing, **dict(*settings))


@pytest.mark.ranks(2, 3, 4)
def test_a_mistake_on_one_rank_is_raised_on_all():
    with pytest.raises(ValueError, match="must be the same on all ranks"):
        Grid((8, 8 if COMM.rank else 9), (1.0, 1.0))
    with pytest.raises(ValueError, match="0 x 8"):
        Grid((0 if COMM.rank == 1 else 8, 8), (1.0, 1.0))
    with pytest.raises(ValueError, match="tile of"):
        grid = Grid((8, 8), (1.0, 1.0))
        grid.gather(np.zeros(grid.local_shape if COMM.rank else (1, 2)))
    with pytest.raises(ValueError, match="first axes of the field"):
        Grid((8, 8), (1.0, 1.0)).scatter(np.zeros((3, 3)))


def test_rows_take_an_index_for_each_axis():
    with pytest.raises(TypeError, match="2 arrays of indices on a grid with 3 axes"):
        Grid((4, 4, 4), (1.0, 1.0, 1.0)).rows(0, 0)


def test_dims_are_taken_as_given():
    assert Grid((8, 8), (1.0, 1.0), dims=(COMM.size, 1)).dims == (COMM.size, 1)


@pytest.mark.ranks(2, 3, 4)
def test_dims_that_leave_a_tile_empty_are_refused():
    with pytest.raises(ValueError, match="tiles without cells"):
        Grid((COMM.size - 1, 8), (1.0, 1.0), dims=(COMM.size, 1))
