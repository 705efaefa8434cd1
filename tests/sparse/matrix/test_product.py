import jax.numpy as jnp
import numpy as np
import pytest
from whole import Entries, columns_of, prove

import mpigrad as mg
from helpers import close
from mpigrad.sparse import Matrix, Pattern
from mpigrad.sparse.matrix.products import product_pattern


def random_pattern(comm, n_local, n_local_columns, share=0.4, dense_row=False, seed=0):
    """Random entries in random order, and on request a row and a column without a gap."""
    n, wide = (comm.mpi.allreduce(k) for k in (n_local, n_local_columns))
    offset = comm.mpi.scan(n_local) - n_local
    generator = np.random.default_rng(seed)
    full = generator.uniform(size=(n, wide)) < share
    if dense_row:
        full[n // 2] = full[:, wide // 2] = True
    rows, columns = np.nonzero(full[offset : offset + n_local])
    shuffled = generator.permutation(len(rows))
    return Pattern.from_coo(
        rows[shuffled] + offset, columns[shuffled], n_local, comm, n_local_columns=n_local_columns
    )


def sizes(comm):
    """Rows of A, columns of A (rows of B), columns of B, on this rank: one row, or none."""
    last = comm.rank == comm.size - 1
    yield 3, 4, 2
    yield 1, (5 if last else 0), 1 + comm.rank
    yield (0 if comm.rank == 0 and comm.size > 1 else 3), 2 + comm.rank, (6 if last else 0)


@pytest.mark.thin(3)
def test_products_are_dense_ones(comm):
    """All in one program: rectangular, empty stripes, dense rows, entries in any order."""
    patterns, values, expected = [], [], []
    for k, (m, n, p) in enumerate(sizes(comm)):
        a = random_pattern(comm, m, n, dense_row=k != 1, seed=k)
        b = random_pattern(comm, n, p, dense_row=k == 2, seed=k + 10)
        A, B = Entries.of(a), Entries.of(b)
        va, vb = A.values(3), B.values(4)
        patterns.append((a, b))
        values.append((va.part, vb.part))
        C = Entries.of(product_pattern(a, b))
        meets = (A.dense(jnp.ones(len(A.rows))) @ B.dense(jnp.ones(len(B.rows)))) > 0
        np.testing.assert_array_equal(C.dense(jnp.ones(len(C.rows))), meets)
        expected.append(C.pick(A.dense(va.whole) @ B.dense(vb.whole))[C.mine])

    @mg.jit
    def products(values):
        return [
            (Matrix(a, va) @ Matrix(b, vb)).values
            for (a, b), (va, vb) in zip(patterns, values, strict=True)
        ]

    close(products(values), expected)


@pytest.mark.ranks(1, 2, 3, 4)
def test_derivatives(comm):
    """First and second, in both factors."""
    a = random_pattern(comm, 3, 2 + comm.rank, dense_row=True)
    b = random_pattern(comm, 2 + comm.rank, 1 if comm.rank else 3, seed=1)
    A, B, C = (Entries.of(p) for p in (a, b, product_pattern(a, b)))
    prove(
        lambda va, vb: (Matrix(a, va) @ Matrix(b, vb)).values,
        lambda va, vb: C.pick(A.dense(va) @ B.dense(vb)),
        (A.values(1), B.values(2)),
        C.mine,
    )


@pytest.mark.full("products and transposes have derivatives and dot tests of their own")
def test_normal_equations(comm):
    """A loss through A.T, A.T @ A and products with vectors: Taylor and dot tests."""
    a = random_pattern(comm, 4, 2 + comm.rank % 2, dense_row=True)
    A, x = Entries.of(a), columns_of(a)
    values = A.values(1)

    def apply(v, x):
        M = Matrix(a, v)
        return (M.T @ M) @ x

    got = mg.jit(apply)(values.part, x.part)
    dense = np.asarray(A.dense(values.whole))
    close(got, (dense.T @ dense @ x.whole)[x.mine])
    assert mg.dot_test(apply, values.part, x.part).error < 1e-12

    def loss(v):
        return jnp.sum(jnp.sin(apply(v, x.part)))

    rates = mg.taylor_test(loss, values.part).rates_with
    assert min(rates[-3:]) > 1.9


@pytest.mark.ranks(2)
def test_batches_and_plans(comm):
    a, b = random_pattern(comm, 3, 3), random_pattern(comm, 3, 2, seed=1)
    assert product_pattern(a, b) is product_pattern(a, b)
    va, vb = Entries.of(a).values(1).part, Entries.of(b).values(2).part
    factors = jnp.arange(1.0, 4)

    @mg.jit
    def batched(va, vb):
        one = mg.vmap(lambda f: (Matrix(a, f * va) @ Matrix(b, vb)).values)(factors)
        both = mg.vmap(lambda f: (Matrix(a, f * va) @ Matrix(b, f * vb)).values)(factors)
        return one, both, (Matrix(a, va) @ Matrix(b, vb)).values

    one, both, single = batched(va, vb)
    close(one, factors[:, None] * single)
    close(both, factors[:, None] ** 2 * single)


def test_errors_are_raised_by_all_ranks(comm):
    a, b = (
        Matrix(p, jnp.ones(p.nnz)) for p in (random_pattern(comm, 3, 3), random_pattern(comm, 2, 3))
    )
    with pytest.raises(ValueError, match="as many columns as the second has rows"):
        a @ b
    if comm.size > 1:
        last = comm.rank == comm.size - 1
        moved = random_pattern(comm, 3 + (comm.rank == 0) - last, 3)
        with pytest.raises(ValueError, match=r"rank 0 owns 3 columns of the first matrix but 4"):
            a @ Matrix(moved, jnp.ones(moved.nnz))
    other = Pattern.from_coo([0], [0], 1, comm.split(comm.rank))
    with pytest.raises(ValueError, match="have different communicators"):
        a @ Matrix(other, jnp.ones(1))
