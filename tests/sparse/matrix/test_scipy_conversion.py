import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from systems import stripes

from helpers import close, found_on
from mpigrad.sparse import Matrix


def random(shape, dtype=np.float64, seed=0):
    """Some entries given twice, some stored zeros, rows in any order."""
    generator = np.random.default_rng(seed)
    count = shape[0] * shape[1] // 2
    i, j = generator.integers(0, shape[0], count), generator.integers(0, shape[1], count)
    values = generator.standard_normal(count)
    if np.issubdtype(dtype, np.complexfloating):
        values = values + 1j * generator.standard_normal(count)
    values[: count // 10] = 0
    return scipy.sparse.coo_array((values.astype(dtype), (i, j)), shape=shape)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.cases("*-float64", "shape1-*", reason="all shapes, and all dtypes of one shape")
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(13, 13), (4, 23), (17, 3), (1, 1)])
def test_round_trip(comm, shape, dtype):
    whole = random(shape, dtype)
    root = comm.size - 1
    A = Matrix.from_scipy(whole if comm.rank == root else None, comm, root=root)
    assert (A.shape, A.dtype) == (shape, dtype)
    again = Matrix.from_scipy(A.local_scipy(), comm)
    np.testing.assert_array_equal(again.values, A.values)
    assert again.pattern.n_local_columns == A.pattern.n_local_columns
    back = again.to_scipy(root)
    assert (back is not None) == (comm.rank == root)
    if back is not None:
        expected = whole.tocsr()
        assert back.dtype == dtype
        assert back.nnz == expected.nnz
        np.testing.assert_array_equal(back.toarray(), expected.toarray())


def test_given_partition_and_given_order(comm):
    shape = (11, 7)
    whole = random(shape)
    rows, columns = stripes(11, comm.size), stripes(7, comm.size, 0 if comm.size > 1 else None)
    A = Matrix.from_scipy(
        whole, comm, root=0, n_local=rows[comm.rank], n_local_columns=columns[comm.rank]
    )
    p = A.pattern
    assert (p.n_local, p.n_local_columns) == (rows[comm.rank], columns[comm.rank])
    x = np.random.default_rng(1).standard_normal(7)
    own = slice(p.offset, p.offset + p.n_local)
    close(A @ jnp.asarray(x[p.column_offset :][: p.n_local_columns]), (whole @ x)[own])
    for form in ("csc", "lil", "bsr"):
        B = Matrix.from_scipy(
            whole.asformat(form),
            comm,
            root=0,
            n_local=rows[comm.rank],
            n_local_columns=columns[comm.rank],
        )
        np.testing.assert_array_equal(B.local_scipy().toarray(), whole.toarray()[own])


def block(comm, n=3):
    return scipy.sparse.eye_array(n, n * comm.size, k=n * comm.rank).tocsr()


FAULTS = [
    (lambda c: None, {"root": 0}, TypeError, "expected a two-dimensional sparse array of SciPy"),
    (lambda c: np.eye(3), {"root": 0}, TypeError, "of SciPy, got ndarray"),
    (lambda c: block(c).astype(int), {}, TypeError, r"with A.astype\(float\)"),
    (lambda c: block(c), {"n_local": 2}, ValueError, "n_local=2, but the block of rank . has 3"),
    (lambda c: block(c), {"n_local_columns": 1}, ValueError, "n_local_columns add up to"),
    (lambda c: random((9, 9)), {"root": 0, "n_local": 20}, ValueError, "has 9 rows, but the rank"),
]


@pytest.mark.parametrize(("make", "options", "error", "message"), FAULTS)
def test_errors_on_all_ranks(comm, make, options, error, message):
    with pytest.raises(error, match=message):
        Matrix.from_scipy(make(comm), comm, **options)


def test_a_fault_of_one_rank_is_an_error_on_all(comm):
    last = comm.rank == comm.size - 1
    with pytest.raises(TypeError, match=found_on(comm, comm.size - 1, "of SciPy")):
        Matrix.from_scipy(None if last else block(comm), comm)
    if comm.size > 1:
        with pytest.raises(ValueError, match="every block has all columns"):
            Matrix.from_scipy(block(comm)[:, :-1] if last else block(comm), comm)
