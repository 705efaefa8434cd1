import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close
from mpigrad.grid import Grid
from mpigrad.sparse import Pattern

FIVE_POINTS = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
FAR = ((0, 0), (3, -1), (-6, 4), (0, -4), (9, 0))  # over several tiles, and out of the grid
SHAPE = (7, 5)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.thin(3)
@pytest.mark.parametrize("offsets", [FIVE_POINTS, FAR], ids=["five points", "far"])
def test_couples_cells_at_the_offsets(comm, offsets):
    grid = Grid(SHAPE, (1.0, 1.0), comm)
    pattern = Pattern.from_stencil(grid, offsets)
    assert pattern.stencil.offsets == offsets
    whole = np.random.default_rng(1).standard_normal((len(offsets), *SHAPE))
    own = jnp.asarray(whole[(slice(None), *grid.slices)])
    number = grid.rows(*np.indices(SHAPE))
    dense = np.zeros((35, 35))
    for coefficient, step in zip(whole, offsets, strict=True):
        for cell in np.ndindex(SHAPE):
            i, j = cell[0] + step[0], cell[1] + step[1]
            if 0 <= i < SHAPE[0] and 0 <= j < SHAPE[1]:
                dense[number[cell], number[i, j]] = coefficient[cell]

    values = mg.jit(pattern.assemble)(own)
    rows = slice(grid.row_offset, grid.row_offset + grid.n_local)
    np.testing.assert_array_equal(
        mg.sparse.Matrix.assemble(pattern, own).local_scipy().toarray(), dense[rows]
    )
    np.testing.assert_array_equal(values, pattern.assemble(list(own)))
    np.testing.assert_array_equal(values, np.ravel(own)[pattern.stencil_positions])
    assert mg.dot_test(pattern.assemble, own).error < 1e-13
    x = np.random.default_rng(2).standard_normal(35)
    close(mg.sparse.Matrix.assemble(pattern, own) @ jnp.asarray(x[rows]), (dense @ x)[rows])


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        (((0, 0), (0, 1)), ValueError, "the offsets must be the same on all ranks"),
        (((0, 0), (0, 0)), ValueError, r"offset \(0, 0\) is given more than once"),
        (((0, 0), (0, 0.5)), TypeError, "offsets must be a sequence of 2 integers each"),
        (((0, 0), (0, 0, 1)), TypeError, "offsets must be a sequence of 2 integers each"),
        ((), TypeError, "offsets must be a sequence of 2 integers each"),
    ],
)
def test_a_fault_of_one_rank_is_an_error_on_all(comm, offsets, error, message):
    grid = Grid(SHAPE, (1.0, 1.0), comm)
    if comm.size == 1 and "on all ranks" in message:
        pytest.skip("one rank cannot differ from others")
    with pytest.raises(error, match=message):
        Pattern.from_stencil(grid, offsets if comm.rank == comm.size - 1 else FIVE_POINTS)


def test_wrong_coefficients(comm):
    grid = Grid(SHAPE, (1.0, 1.0), comm)
    pattern = Pattern.from_stencil(grid, FIVE_POINTS)
    with pytest.raises(ValueError, match="for each of the 5 offsets"):
        pattern.assemble(jnp.zeros((4, *grid.local_shape)))
    with pytest.raises(ValueError, match="for each of the 5 offsets"):
        pattern.assemble([jnp.zeros(grid.local_shape)] * 4 + [jnp.zeros(3)])
    with pytest.raises(TypeError, match=r"grid must be a mpigrad\.Grid"):
        Pattern.from_stencil(SHAPE, FIVE_POINTS)
    own = [comm.rank]
    with pytest.raises(ValueError, match=r"was not made by Pattern\.from_stencil"):
        assert Pattern.from_coo(own, own, 1, comm).stencil_positions
