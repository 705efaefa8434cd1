import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import grid_system, rectangular_system
from whole import Entries, columns_of, prove, rows_of

import mpigrad as mg
from helpers import close
from mpigrad import sparse
from mpigrad.sparse import Matrix, Pattern


@pytest.mark.cases("0", reason="most other tests have rows on all ranks")
@pytest.mark.parametrize("empty", [None, 0])
def test_product_is_scipys(comm, empty):
    import scipy.sparse

    system = grid_system(comm, empty=empty if comm.size > 1 else None)
    coo = (system.all_values, (system.rows, system.columns))
    A = scipy.sparse.coo_array(coo, shape=(30, 30)).tocsr()
    close(mg.jit(lambda A, x: A @ x)(system.matrix, system.b), (A @ system.all_b)[system.mine])
    X = np.random.default_rng(0).standard_normal((30, 3))
    close(system.matrix @ jnp.asarray(X[system.mine]), (A @ X)[system.mine])
    close(system.matrix.diagonal(), A.diagonal()[system.mine])
    assert system.matrix.shape == (30, 30)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.cases("shape0", reason="a tall matrix runs the same code")
@pytest.mark.parametrize("shape", [(7, 19), (23, 5)])
def test_rectangular_product(comm, shape):
    """Rows and columns in stripes of different sizes, some of them empty."""
    system = rectangular_system(comm, *shape)
    dense = np.zeros(shape)
    dense[system.rows, system.columns] = system.all_values
    x = np.random.default_rng(2).standard_normal(shape[1])
    xs = jnp.asarray(x[system.pattern.column_offset :][: system.pattern.n_local_columns])

    def product(values, x):
        return Matrix(system.pattern, values) @ x

    close(mg.jit(product)(system.values, xs), (dense @ x)[system.mine])
    assert system.matrix.shape == shape
    assert mg.dot_test(product, system.values, xs).error < 1e-13


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.cases("columns1", reason="test_rectangular_product has a dot test of vectors")
@pytest.mark.parametrize("columns", [(), (2,)])
def test_dot(comm, columns):
    system = grid_system(comm)
    generator = np.random.default_rng(comm.rank)
    x = jnp.asarray(generator.standard_normal((system.pattern.n_local, *columns)))

    def product(values, x):
        return Matrix(system.pattern, values) @ x

    assert mg.dot_test(product, system.values, x).error < 1e-13


@pytest.mark.full("test_derivatives_of_any_order has the second one of products, too")
def test_second_derivative(comm):
    """The gradient of (Ax).(Ax) in the values, against the dense matrix."""
    system = grid_system(comm)
    direction = np.random.default_rng(5).standard_normal(len(system.rows))
    x = np.random.default_rng(6).standard_normal(30)

    def share(values):
        return jnp.sum((Matrix(system.pattern, values) @ jnp.asarray(x[system.mine])) ** 3)

    def whole(values):
        return jnp.sum((system.dense(values) @ x) ** 3)

    v = jnp.asarray(direction[system.entries])
    _, got = mg.jvp(mg.grad(share), (system.values,), (v,))
    _, expected = jax.jvp(jax.grad(whole), (system.all_values,), (direction,))
    close(got, expected[system.entries])


def test_is_a_pytree_of_its_values(comm):
    system = grid_system(comm)
    doubled = jax.tree.map(lambda v: 2 * v, system.matrix)
    assert len(jax.tree.leaves(system.matrix)) == 1
    close(doubled @ system.b, 2 * (system.matrix @ system.b))
    gradient = mg.grad(lambda A: jnp.sum(A @ system.b))(system.matrix)
    assert isinstance(gradient, Matrix)
    close(gradient.values, system.all_b[system.columns[system.entries]])
    with pytest.raises(AttributeError, match="not changed in place"):
        system.matrix.values = system.values


@pytest.mark.ranks(1, 2, 3)
def test_derivatives_of_any_order(comm):
    """Derivatives of products, scalings, the transpose and the diagonal, in all operands."""
    pattern = rectangular_system(comm, 7, 19).pattern
    entries = Entries.of(pattern)
    x, y = columns_of(pattern, 2), rows_of(pattern)
    d = columns_of(pattern)

    def local(v, x, y, d):
        A = Matrix(pattern, v)
        B = (A.scale_rows(y) + A.scale_columns(d)) / 2
        return (B @ x).sum(1) + B @ (A.T @ y) + 3 * B.diagonal()

    def whole(v, x, y, d):
        A = entries.dense(v)
        B = (y[:, None] * A + A * d) / 2
        return (B @ x).sum(1) + B @ (A.T @ y) + 3 * jnp.diagonal(B)

    prove(local, whole, (entries.values(1), x, y, d), y.mine)


@pytest.mark.ranks(2)
def test_batches_scans_and_complex_numbers(comm):
    system = grid_system(comm)
    pattern, b = system.pattern, system.b
    factors = jnp.arange(1.0, 4)
    v = jnp.asarray(system.values + 1j * jnp.cos(system.values))

    def product(f, g):
        return Matrix(pattern, f * v) @ (g * b)

    @mg.jit
    def program(factors):
        values = mg.vmap(product, (0, None))(factors, 1.0)
        vectors = mg.vmap(product, (None, 0))(1.0, factors)
        both = mg.vmap(product)(factors, factors)
        nested = mg.vmap(mg.vmap(product, (0, None)), (None, 0))(factors, factors)
        looped = jax.lax.scan(
            lambda x, f: (Matrix(pattern, f * v) @ x, None), v[:0].sum() + b, factors
        )
        back = mg.vmap(lambda f: mg.vjp(lambda v: Matrix(pattern, v) @ (f * b), v)[1](b + 0j)[0])
        return values, vectors, both, nested, looped[0], back(factors)

    A = system.dense(system.all_values) + 1j * system.dense(jnp.cos(system.all_values))
    once = (A @ system.all_b)[system.mine]
    values, vectors, both, nested, looped, back = program(factors)
    close(values, factors[:, None] * once)
    close(vectors, factors[:, None] * once)
    close(both, factors[:, None] ** 2 * once)
    close(nested, factors[:, None, None] * factors[:, None] * once)
    close(looped, 6 * (A @ (A @ (A @ system.all_b)))[system.mine], 1e-10)
    outer = (system.all_b[system.rows] * system.all_b[system.columns])[system.entries]
    close(back, factors[:, None] * outer + 0j)
    single = Matrix(pattern, v.astype("complex64")) @ b.astype("float32")
    assert single.dtype == jnp.complex64
    close(single, once.astype("complex64"), 1e-5)


@pytest.mark.ranks(2)
def test_scalars_and_their_derivatives(comm):
    system = grid_system(comm)
    A = system.matrix
    close((np.float64(2) * A).values, 2 * A.values)
    close((jnp.float64(2) * A - A / 2).values, 1.5 * A.values)
    slope = mg.grad(lambda a: jnp.sum((a * A) @ system.b))(2.0)
    close(comm.mpi.allreduce(float(slope)), comm.mpi.allreduce(float((A @ system.b).sum())))


def test_errors_name_what_is_wrong(comm):
    system = grid_system(comm)
    n, nnz = system.pattern.n_local, system.pattern.nnz
    with pytest.raises(ValueError, match=rf"has {nnz} entries there. Give shape \({nnz},\)"):
        Matrix(system.pattern, jnp.zeros(nnz + 1))
    with pytest.raises(TypeError, match="values must be floating-point"):
        Matrix(system.pattern, jnp.zeros(nnz, int))
    with pytest.raises(TypeError, match=r"must be a mpigrad\.sparse\.Pattern"):
        Matrix("pattern", jnp.zeros(nnz))
    with pytest.raises(ValueError, match=rf"owns {n} columns"):
        system.matrix @ jnp.zeros(n + 1)
    with pytest.raises(ValueError, match=rf"owns {n} columns"):
        system.matrix @ jnp.zeros((n, 1, 1))
    with pytest.raises(ValueError, match=rf"owns {n} rows. Give shape \({n},\)"):
        system.matrix.scale_rows(jnp.zeros(n + 1))
    with pytest.raises(ValueError, match=rf"owns {n} columns. Give shape \({n},\)"):
        system.matrix.scale_columns(2.0)


@pytest.mark.full("assembly, transposes and solves are tested one by one, too")
def test_triangular_by_plain_jax(comm):
    """A rank whose entries nobody reads, one that gives none: batched and differentiated."""
    n = 2 * comm.size
    i = np.concatenate([np.arange(n), np.arange(n - 1)])
    j = np.concatenate([np.arange(n), np.arange(1, n)])
    values = np.linspace(1, 2, len(i))
    gives = comm.rank == comm.size - 1  # all entries
    pattern = Pattern.from_coo(i if gives else [], j if gives else [], 2, comm)
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)
    x = np.cos(np.arange(n))
    preconditioner = sparse.BoomerAMG() if sparse.hypre_available() else sparse.Jacobi()
    gmres = sparse.GMRES(preconditioner=preconditioner, rtol=1e-13)

    def ours(given, x):
        A = Matrix(pattern, pattern.assemble(given))
        return A @ x, A.T @ x, sparse.solve(A, x, gmres).value

    def dense(values, x):
        A = jnp.zeros((n, n)).at[i, j].set(values)
        return A @ x, A.T @ x, jnp.linalg.solve(A, x)

    here = (jnp.asarray(values if gives else values[:0]), jnp.asarray(x[mine]))
    there = (jnp.asarray(values), jnp.asarray(x))

    def batch(arguments):
        return tuple(jnp.stack([a, 1.5 * a]) for a in arguments)

    want = jax.vmap(dense)(*batch(there))
    close(jax.vmap(ours)(*batch(here)), [w[:, mine] for w in want], 1e-10)
    for moved in ((1, 0), (0, 1)):  # entries, x
        along = [
            tuple(k * a**2 for k, a in zip(moved, whole, strict=True)) for whole in (here, there)
        ]
        got, want = jax.jvp(ours, here, along[0])[1], jax.jvp(dense, there, along[1])[1]
        close(got, [w[mine] for w in want], 1e-10)
