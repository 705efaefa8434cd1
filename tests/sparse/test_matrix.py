import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import grid_system

import mpigrad as mg
from helpers import close
from mpigrad.sparse import Matrix


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
@pytest.mark.parametrize("columns", [(), (2,)])
def test_dot(comm, columns):
    system = grid_system(comm)
    generator = np.random.default_rng(comm.rank)
    x = jnp.asarray(generator.standard_normal((system.pattern.n_local, *columns)))

    def product(values, x):
        return Matrix(system.pattern, values) @ x

    assert mg.dot_test(product, system.values, x).error < 1e-13


def test_second_derivative(comm):
    """Of (Ax).(Ax) in the values, against the dense matrix."""
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


def test_batch_of_matrices(comm):
    system = grid_system(comm)
    factors = jnp.arange(1.0, 4.0)
    got = mg.vmap(lambda f: Matrix(system.pattern, f * system.values) @ system.b)(factors)
    close(got, factors[:, None] * (system.matrix @ system.b))


def test_errors_name_what_is_wrong(comm):
    system = grid_system(comm)
    n, nnz = system.pattern.n_local, system.pattern.nnz
    with pytest.raises(ValueError, match=rf"has {nnz} entries: give shape \({nnz},\)"):
        Matrix(system.pattern, jnp.zeros(nnz + 1))
    with pytest.raises(TypeError, match="give floating-point values"):
        Matrix(system.pattern, jnp.zeros(nnz, int))
    with pytest.raises(TypeError, match=r"must be a mpigrad\.sparse\.Pattern"):
        Matrix("pattern", jnp.zeros(nnz))
    with pytest.raises(ValueError, match=rf"owns {n} rows"):
        system.matrix @ jnp.zeros(n + 1)
    with pytest.raises(ValueError, match=rf"owns {n} rows"):
        system.matrix @ jnp.zeros((n, 1, 1))
