import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import grid_system, rectangular_system

import mpigrad as mg
from helpers import close
from mpigrad.grid import Grid
from mpigrad.sparse import Pattern
from mpigrad.sparse.matrix.products import transpose_values, transposed


def dense(pattern, values):
    """The whole matrix, on every rank."""
    A = np.zeros((pattern.n_rows, pattern.n_columns), np.asarray(values).dtype)
    rows, values = pattern.rows + pattern.offset, np.asarray(values)[pattern.order]
    for part in pattern.comm.mpi.allgather((rows, pattern.columns, values)):
        A[part[0], part[1]] = part[2]
    return A


def full(comm, n, own):
    """All entries of n x n, `own` rows on each rank."""
    first = comm.mpi.scan(own) - own
    rows = np.repeat(np.arange(first, first + own), n)
    return Pattern.from_coo(rows, np.tile(np.arange(n), own), own, comm)


@pytest.mark.ranks(2, 3)
def test_adcme(comm):
    """The cases of ADCME-MPI: 4 x 4 on two ranks, 6 x 6 on three."""
    n = 2 * comm.size
    pattern = full(comm, n, 2)
    numbers = jnp.asarray(n * (pattern.rows + pattern.offset) + pattern.columns + 1.0)
    got = dense(transposed(pattern), transpose_values(pattern, numbers))
    np.testing.assert_array_equal(got, np.arange(1.0, n * n + 1).reshape(n, n).T)


def systems(comm):
    yield grid_system(comm)
    yield grid_system(comm, empty=0 if comm.size > 1 else None)
    for shape in ((7, 19), (23, 5), (1, 9), (4, 3)):
        yield rectangular_system(comm, *shape)


@pytest.mark.ranks(1, 2, 3, 4)
def test_any_matrix(comm):
    """Stripes that are empty or of one row, more columns than rows, and back again."""
    for system in systems(comm):
        pattern, values = system.pattern, system.values
        back = transposed(pattern)
        assert transposed(back) is pattern
        assert transposed(pattern) is back
        assert back.is_ordered
        assert (back.n_local, back.n_local_columns) == (pattern.n_local_columns, pattern.n_local)

        @jax.jit
        def there_and_back(values, pattern=pattern, back=back):
            there = transpose_values(pattern, values)
            return there, transpose_values(back, there)

        there, again = there_and_back(values)
        np.testing.assert_array_equal(dense(back, there), dense(pattern, values).T)
        np.testing.assert_array_equal(again, values)


@pytest.mark.ranks(1, 2, 4)
def test_a_stencil_stays_one(comm):
    pattern = Pattern.from_stencil(Grid((5, 4), (1.0, 1.0), comm), ((0, 0), (-1, 0), (1, 2)))
    values = jnp.asarray(np.random.default_rng(comm.rank).standard_normal(pattern.nnz))
    back = transposed(pattern)
    assert back.stencil is not None
    assert back.stencil.offsets == ((0, 0), (1, 0), (-1, -2))
    there = transpose_values(pattern, values)
    np.testing.assert_array_equal(dense(back, there), dense(pattern, values).T)
    np.testing.assert_array_equal(transpose_values(back, there), values)


@pytest.mark.ranks(1, 2, 3, 4)
def test_dot_and_batches(comm):
    system = rectangular_system(comm, 7, 19)
    values, transpose = system.values, lambda v: transpose_values(system.pattern, v)
    assert mg.dot_test(transpose, values).error < 1e-13
    factors = jnp.arange(1.0, 4)
    got = mg.jit(mg.vmap(lambda f: transpose(f * values)))(factors)
    close(got, factors[:, None] * transpose(values))


@pytest.mark.ranks(2, 3)
@pytest.mark.thin(3)
def test_only_neighbours_exchange(comm):
    """On a line: the values of the entries next to the diagonal block, one message each way."""
    n = 3
    rows = np.arange(n) + n * comm.rank
    pairs = [(i, j) for i in rows for j in (i - 1, i, i + 1) if 0 <= j < n * comm.size]
    pattern = Pattern.from_coo(*np.transpose(pairs), n, comm)
    transposed(pattern)
    plan = pattern.derived["transpose"]
    expected = tuple(r for r in (comm.rank - 1, comm.rank + 1) if 0 <= r < comm.size)
    assert plan.neighbors == expected
    assert plan.sendcounts == plan.recvcounts == (1,) * len(expected)
