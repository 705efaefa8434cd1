"""Entries from any rank, duplicates added up, compared with the dense sum of all contributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import stripes

import mpigrad as mg
from helpers import close
from mpigrad.sparse import Matrix, Pattern


def contributions(kind, size):
    """(row and column sizes of all ranks, rows, columns, values, the rank that gives each)."""
    generator = np.random.default_rng(len(kind))
    sizes = columns = stripes(11, size)
    count = 90
    if kind == "empty stripe":
        sizes = columns = stripes(11, size, empty=size - 1 if size > 1 else None)
    elif kind == "one row for each":
        sizes = columns = [1] * size
    elif kind == "rectangular":
        columns = stripes(23, size, empty=0 if size > 1 else None)
    n, m = sum(sizes), sum(columns)
    i, j = generator.integers(0, n, count), generator.integers(0, m, count)
    giver = generator.integers(0, size, count)
    if kind == "dense row":
        i[: count // 2] = n // 2
    elif kind == "one gives all":
        giver[:] = size - 1
    elif kind == "local duplicates":
        giver = np.searchsorted(np.cumsum(sizes), i, side="right")
    return sizes, columns, i, j, generator.standard_normal(count), giver


KINDS = (
    "any rank",
    "empty stripe",
    "one row for each",
    "rectangular",
    "dense row",
    "one gives all",
    "local duplicates",
)


@pytest.mark.cases(
    "any rank", "empty stripe", "rectangular", "local duplicates",
    reason="entries of other ranks, ranks without rows, and sums without messages",
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_sum_of_all_contributions(comm, kind):
    sizes, columns, i, j, values, giver = contributions(kind, comm.size)
    mine = giver == comm.rank
    pattern = Pattern.from_coo(
        i[mine], j[mine], sizes[comm.rank], comm, n_local_columns=columns[comm.rank]
    )
    dense = np.zeros((sum(sizes), sum(columns)))
    np.add.at(dense, (i, j), values)
    given = jnp.asarray(values[mine])
    assert pattern.nnz == len(np.unique(np.stack([pattern.rows, pattern.columns]), axis=1).T)
    assert comm.mpi.allreduce(pattern.nnz) == np.unique(i * dense.shape[1] + j).size
    assert pattern.is_ordered
    rows = slice(pattern.offset, pattern.offset + pattern.n_local)
    assembled = mg.jit(pattern.assemble)(given)
    close(Matrix(pattern, assembled).local_scipy().toarray(), dense[rows])
    assert mg.dot_test(pattern.assemble, given).error < 1e-13


def test_batches_and_second_order(comm):
    sizes, _, i, j, values, giver = contributions("any rank", comm.size)
    mine = giver == comm.rank
    pattern = Pattern.from_coo(i[mine], j[mine], sizes[comm.rank], comm)
    given = jnp.asarray(values[mine])
    x = np.linspace(1, 2, pattern.n_rows)
    own = jnp.asarray(x[pattern.offset :][: pattern.n_local])

    @mg.jit
    def several(given):
        batch = mg.vmap(pattern.assemble)(jnp.stack([given, 2 * given]))
        loss = lambda v: jnp.sum((Matrix.assemble(pattern, v) @ own) ** 3)
        return batch, mg.jvp(mg.grad(loss), (given,), (jnp.cos(given),))[1]

    def whole(v):
        return jnp.sum((jnp.zeros((11, 11)).at[i, j].add(v) @ x) ** 3)

    batch, product = several(given)
    once = pattern.assemble(given)
    np.testing.assert_array_equal(batch, [once, 2 * once])  # to the bit
    expected = jax.jvp(jax.grad(whole), (jnp.asarray(values),), (jnp.cos(values),))[1]
    close(product, expected[mine])


@pytest.mark.thin(3)
def test_only_neighbours_meet(comm):
    """Elements of a bar: each rank's last one touches the first node of the next rank."""
    n = 3
    element = np.arange(n) + n * comm.rank
    if comm.rank == comm.size - 1:
        element = element[:-1]
    nodes = np.stack([element, element + 1])
    i, j = (a.ravel() for a in np.broadcast_arrays(nodes[:, None], nodes[None, :]))
    pattern = Pattern.from_coo(i, j, n, comm)
    beside = [r for r in (comm.rank - 1, comm.rank + 1) if 0 <= r < comm.size]
    assert pattern.assembly.neighbors == pattern.ghosts.neighbors == tuple(beside)
    # Both entries in the row of the next rank's node: one message, that way only.
    assert pattern.assembly.sendcounts == tuple(2 * (r > comm.rank) for r in beside)
    stiffness = np.repeat([[1.0], [-1.0], [-1.0], [1.0]], len(element), axis=1).ravel()
    A = Matrix.assemble(pattern, stiffness)
    np.testing.assert_array_equal(A @ jnp.ones(n), np.zeros(n))
    ends = np.arange(n) + n * comm.rank
    ends = (ends == 0) | (ends == n * comm.size - 1)
    np.testing.assert_array_equal(A.diagonal(), np.where(ends, 1, 2))


def test_entries_given_once_by_their_owner_stay_as_given(comm):
    n = 3
    rows = np.arange(n)[::-1] + n * comm.rank
    pattern = Pattern.from_coo(rows, rows, n, comm)
    assert pattern.assembly is None
    values = jnp.arange(float(n))
    np.testing.assert_array_equal(pattern.assemble(values), values)
    with pytest.raises(ValueError, match=rf"gave the pattern {n} entries. Give shape \({n},\)"):
        pattern.assemble(jnp.zeros(n + 1))


def test_wrong_lengths_name_the_remedy(comm):
    own = [comm.rank]
    pattern = Pattern.from_coo(own * 3, own * 3, 1, comm)
    with pytest.raises(ValueError, match=r"Give shape \(1,\), or pattern.assemble\(contribution"):
        Matrix(pattern, jnp.zeros(3))
    with pytest.raises(ValueError, match=r"gave the pattern 3 entries. Give shape \(3,\)"):
        pattern.assemble(jnp.zeros(1))
    close(Matrix.assemble(pattern, jnp.ones(3)).values, [3.0])


def test_coefficients_of_a_stencil_may_be_lists(comm):
    grid = mg.Grid((7,), (1.0,), comm)
    pattern = Pattern.from_stencil(grid, [(-1,), (0,), (1,)])
    n = grid.local_shape[0]
    lists = [[-1.0] * n, [2.0] * n, [-1.0] * n]
    np.testing.assert_array_equal(pattern.assemble(lists), pattern.assemble(jnp.asarray(lists)))
