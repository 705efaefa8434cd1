import jax.numpy as jnp
import numpy as np
import pytest
from test_product import random_pattern
from whole import Entries, prove

import mpigrad as mg
from helpers import close
from mpigrad.grid import Grid
from mpigrad.sparse import Matrix, Pattern
from mpigrad.sparse.matrix.products import union


def test_sums_and_differences(comm):
    """Values and derivatives, of both matrices, on the union of the patterns."""
    m, n = (0 if comm.rank == 1 else 4), 1 + comm.rank
    a, b = random_pattern(comm, m, n), random_pattern(comm, m, n, seed=1, dense_row=True)
    A, B, C = (Entries.of(p) for p in (a, b, union(a, b)))
    ones = [np.asarray(M.dense(jnp.ones(len(M.rows)))) for M in (A, B, C)]
    np.testing.assert_array_equal(ones[2], (ones[0] + ones[1]) > 0)
    assert union(a, b) is union(a, b)
    assert union(a, a) is a

    def combined(va, vb):
        P, Q = Matrix(a, va), Matrix(b, vb)
        return (2 * P + Q / 3 - (-P - Q * 0.5)).values

    prove(
        combined,
        lambda va, vb: C.pick(3 * A.dense(va) + (1 / 3 + 0.5) * B.dense(vb)),
        (A.values(1), B.values(2)),
        C.mine,
    )


@pytest.mark.ranks(2)
def test_one_pattern_and_batches(comm):
    a = random_pattern(comm, 3, 3)
    v = Entries.of(a).values(1).part
    A = Matrix(a, v)
    assert (A + A).pattern is a
    close((A + A).values, 2 * v)
    close((A - A).values, 0 * v)
    symmetric = mg.jit(mg.vmap(lambda f: (Matrix(a, f * v) + Matrix(a, v).T).values))
    close(symmetric(jnp.ones(3)), jnp.broadcast_to((A + A.T).values, (3, (A + A.T).pattern.nnz)))


@pytest.mark.ranks(1, 2, 3)
def test_the_sum_of_two_stencils_is_a_stencil(comm):
    """So that PFMG takes I - L, a step of an implicit scheme."""
    grid = Grid((6, 5), (1.0, 1.0), comm)
    identity = Pattern.from_stencil(grid, [(0, 0)])
    five = Pattern.from_stencil(grid, [(0, -1), (-1, 0), (0, 0), (1, 0), (0, 1)])
    A, B = (
        Matrix(p, jnp.asarray(10.0 * p.rows + p.columns, float) + 0.5) for p in (identity, five)
    )
    C = A + 2 * B
    assert set(C.pattern.stencil.offsets) == set(five.stencil.offsets)
    x = jnp.sin(jnp.arange(grid.n_local) + grid.row_offset + 1.0)
    close(C @ x, A @ x + 2 * (B @ x))
    other = random_pattern(comm, grid.n_local, grid.n_local)
    assert union(five, other).stencil is None


def test_errors_are_raised_by_all_ranks(comm):
    a = random_pattern(comm, 3, 3)
    A, wide = Matrix(a, jnp.ones(a.nnz)), random_pattern(comm, 3, 4)
    with pytest.raises(ValueError, match=r"shapes .* but must have the same"):
        A + Matrix(wide, jnp.ones(wide.nnz))
    if comm.size > 1:
        last = comm.rank == comm.size - 1
        moved = random_pattern(comm, 3 + (comm.rank == 0) - last, 3)
        with pytest.raises(ValueError, match=r"rank 0 owns 3 rows and 3 columns .* but 4 and 3"):
            A - Matrix(moved, jnp.ones(moved.nnz))
    with pytest.raises(TypeError):
        A + 1
    with pytest.raises(TypeError, match="expected a scalar, got an array"):
        A * jnp.ones(3)
    with pytest.raises(TypeError, match="expected a scalar, got a matrix"):
        A * A
