"""Colourings, and Jacobians compressed by them, compared with dense ones of all ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fields import SHAPE, Field, flux, pad_whole
from mpi4py import MPI
from systems import grid_system, stripes

import mpigrad as mg
from helpers import close
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.sparse import Pattern, sparse_jacobian
from mpigrad.sparse.nonlinear.sparse_jacobian import colouring


def test_jacobian_of_a_field(comm):
    field = Field(comm)
    pattern = field.pattern()
    u = np.random.default_rng(3).uniform(0.5, 1, SHAPE)

    def f(u, pad):
        u = pad(u)
        return jnp.sin(flux(1 + u**2, u, 0.4))

    jacobian = sparse_jacobian(lambda u: f(u, field.pad), pattern)
    got = mg.jit(lambda u: jacobian(u).values)(field.tile(u))
    whole = jax.jacobian(lambda u: f(u, pad_whole))(u).reshape(*SHAPE, -1)
    rows = np.asarray(whole[field.mine]).reshape(field.grid.n_local, -1)
    # Columns of the whole grid in tile numbering.
    cells = np.arange(u.size).reshape(SHAPE)
    tiles = [cells[field.grid.slices_of(rank)].ravel() for rank in range(comm.size)]
    rows = rows[:, np.concatenate(tiles)]
    expected = np.empty(pattern.nnz)
    expected[pattern.order] = rows[pattern.rows, pattern.columns]
    close(got, expected)
    assert np.count_nonzero(rows) <= pattern.nnz
    assert 5 <= colouring(pattern).count <= 8


@pytest.mark.ranks(2)
def test_a_rank_without_rows_is_batched_and_differentiated(comm):
    """By JAX's own vmap and jvp: the sum of its entries, none, goes into the allreduce of all."""
    system = grid_system(comm, empty=1)
    jacobian = sparse_jacobian(lambda x: (system.matrix @ x) ** 2, system.pattern)
    assert (system.pattern.n_local == 0) == (comm.rank == 1)

    def total(x):
        return mg.allreduce(jnp.sum(jacobian(x).values), comm=comm)

    x = system.b
    both = jax.jit(lambda x: (jax.jvp(total, (x,), (x,)), jax.vmap(total)(jnp.stack([x, 2 * x]))))
    (value, tangent), batch = both(x)
    matrix = np.asarray(system.dense(system.all_values))
    expected = 2 * np.sum(matrix @ system.all_b * matrix.sum(1))
    close((value, tangent, batch), (expected, expected, np.array([1, 2]) * expected))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.thin(3)
@pytest.mark.parametrize("columns", [40, 23])
def test_colours_are_those_of_one_rank(comm, columns):
    """A random pattern, with a dense row and with ranks without rows, or without columns."""
    random = np.random.default_rng(columns)
    dense = random.random((40, columns)) < 0.06
    dense[7] = random.random(columns) < 0.5
    rows, wide = (stripes(n, comm.size, empty) for n, empty in ((40, 1), (columns, 2)))
    if comm.size < 3:
        rows, wide = stripes(40, comm.size), stripes(columns, comm.size)

    def pattern(rows, wide, comm):
        first = sum(rows[: comm.rank])
        i, j = np.nonzero(dense[first : first + rows[comm.rank]])
        shuffled = np.random.default_rng(1).permutation(len(i))
        indices, width = (i[shuffled] + first, j[shuffled]), wide[comm.rank]
        return Pattern.from_coo(*indices, rows[comm.rank], comm, n_local_columns=width)

    mine = colouring(pattern(rows, wide, comm))
    everyone = np.concatenate(comm.mpi.allgather(mine.columns))
    for row in dense:
        assert len(set(everyone[row])) == row.sum()
    assert mine.count == everyone.max() + 1
    alone = Communicator(MPI.COMM_SELF)
    np.testing.assert_array_equal(colouring(pattern([40], [columns], alone)).columns, everyone)


def test_shapes_are_checked(comm):
    own = 2 * comm.rank + np.arange(2)
    pattern = Pattern.from_coo(own, own, 2, comm)
    with pytest.raises(ValueError, match=rf"x has 3 entries on rank {comm.rank}"):
        sparse_jacobian(jnp.sin, pattern)(jnp.ones(3))
    with pytest.raises(ValueError, match=rf"F returns 1 entries on rank {comm.rank}"):
        sparse_jacobian(lambda x: x[:1], pattern)(jnp.ones(2))


@pytest.mark.parametrize("corners", [False, True])
def test_stencils_have_few_colours(comm, corners):
    around = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if corners or i * j == 0]
    pattern = Pattern.from_stencil(Grid((9, 8), (1.0, 1.0), comm), around)
    assert colouring(pattern).count == len(around)
