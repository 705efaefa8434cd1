import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import grid_system
from whole import Entries, prove, rows_of

import mpigrad as mg
from helpers import close
from mpigrad.sparse import PCG, Jacobi, Matrix, Pattern, solve

FIXED = np.random.default_rng(8).random(30) < 0.3
VALUES = np.random.default_rng(9).standard_normal(30)


def whole(A):
    return A.pattern.comm.mpi.bcast(None if (got := A.to_scipy()) is None else got.toarray())


def gathered(comm, x):
    return np.concatenate(comm.mpi.allgather(np.asarray(x)))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("columns", [(), (2,)])
def test_prescribes_the_solution(comm, columns):
    system = grid_system(comm, empty=0 if comm.size > 1 else None)
    dense = np.asarray(system.dense(system.all_values))
    mine = system.mine
    factors = np.arange(1, 3) if columns else 1
    shape = (30, *[1] * len(columns))
    b, values = system.all_b.reshape(shape) * factors, VALUES.reshape(shape) * factors**2
    fixed = FIXED[mine]

    @mg.jit
    def conditions(A, b, values):
        return A.at_boundary(fixed), A.at_boundary(fixed, b, values)

    rows, (both, rhs) = conditions(system.matrix, b[mine], values[mine])
    cleared = np.where(FIXED[:, None], np.eye(30), dense)
    close(whole(rows), cleared)
    close(whole(both), np.where(FIXED[None], np.eye(30), cleared))
    assert both.pattern is rows.pattern is system.pattern
    x = np.linalg.solve(cleared, np.where(FIXED.reshape(shape), values, b))
    close(np.linalg.solve(whole(both), gathered(comm, rhs)), x, rtol=1e-9)
    close(x[FIXED], values[FIXED])


def test_derivatives_of_first_and_second_order(comm):
    """In the entries, the right-hand side and the prescribed values."""
    system = grid_system(comm, empty=0 if comm.size > 2 else None)
    entries, eye = Entries.of(system.pattern), jnp.eye(30)

    def local(a, b, values):
        A, rhs = Matrix(system.pattern, a).at_boundary(FIXED[system.mine], b, values)
        return A @ jnp.cos(rhs)

    def whole(a, b, values):
        A = entries.dense(a)
        rhs = jnp.where(FIXED, values, b - A @ jnp.where(FIXED, values, 0))
        return jnp.where(FIXED | FIXED[:, None], eye, A) @ jnp.cos(rhs)

    b, values = rows_of(system.pattern, seed=1), rows_of(system.pattern, seed=2)
    prove(local, whole, (entries.values(1), b, values), b.mine)


def test_batches(comm):
    """Derivatives of Dirichlet conditions, scaled rows and columns, and diagonals."""
    system = grid_system(comm)
    fixed, d = FIXED[system.mine], jnp.arange(1.0, len(system.b) + 1)

    def conditions(factor):
        A = Matrix(system.pattern, factor * system.values)
        B, rhs = A.at_boundary(fixed, factor * system.b, factor)
        return B.values, rhs, A.scale_rows(d).values, A.scale_columns(d).values, A.diagonal()

    factors = jnp.array([1.0, 2.0, -0.5])
    got, one = mg.jit(mg.vmap(conditions))(factors), mg.jit(conditions)
    for k, factor in enumerate(factors):
        close([part[k] for part in got], list(one(factor)))


@pytest.mark.ranks(1, 2, 3, 4)
def test_dot(comm):
    system = grid_system(comm)
    fixed = FIXED[system.mine]

    def condition(a, b, values):
        A, rhs = Matrix(system.pattern, a).at_boundary(fixed, b, values)
        return A.values, rhs

    values = jnp.asarray(VALUES[system.mine])
    assert mg.dot_test(condition, system.values, system.b, values).error < 1e-13


@pytest.mark.full("derivatives of conditions and of solves are tested one by one")
@pytest.mark.ranks(2)
def test_gradient_of_a_solve(comm):
    """In stored values, right-hand side and prescribed values, against the dense system."""
    system = grid_system(comm)
    fixed = FIXED[system.mine]
    solver = PCG(rtol=1e-12, max_steps=100, preconditioner=Jacobi())

    def share(a, b, values):
        A, rhs = Matrix(system.pattern, a).at_boundary(fixed, b, values)
        return jnp.sum(solve(A, rhs, solver).value ** 3)

    def loss(a, b, values):
        A = jnp.where(FIXED[:, None], jnp.eye(30), system.dense(a))
        return jnp.sum(jnp.linalg.solve(A, jnp.where(FIXED, values, b)) ** 3)

    got = mg.jit(mg.grad(share, argnums=(0, 1, 2)))(
        system.values, system.b, jnp.asarray(VALUES[system.mine])
    )
    expected = jax.grad(loss, argnums=(0, 1, 2))(system.all_values, system.all_b, VALUES)
    for mine, whole, part in zip(
        got, expected, (system.entries, system.mine, system.mine), strict=True
    ):
        close(mine, whole[part], rtol=1e-9)


def test_one_value_for_all_rows(comm):
    system = grid_system(comm)
    A, b = system.matrix.at_boundary(FIXED[system.mine], system.b, 2)
    B, c = system.matrix.at_boundary(FIXED[system.mine], system.b, jnp.full(len(system.b), 2.0))
    close((A.values, b), (B.values, c), rtol=0)
    _, homogeneous = system.matrix.at_boundary(FIXED[system.mine], system.b)
    np.testing.assert_array_equal(homogeneous, np.where(FIXED, 0, system.all_b)[system.mine])


def test_diagonal_must_be_stored_where_rows_are_fixed(comm):
    """The first row of the last rank lacks an entry."""
    rows = np.array([0, 1]) + 2 * comm.rank
    columns = rows.copy()
    last = comm.rank == comm.size - 1
    if last:
        columns[0] += 1
    A = Matrix(Pattern.from_coo(rows, columns, 2, comm), jnp.array([3.0, 4.0]))
    ok = A.at_boundary(jnp.array([False, True]))
    np.testing.assert_array_equal(ok.values, [3, 1])
    with pytest.raises(Exception, match=r"1 of the fixed rows have no diagonal entry"):
        A.at_boundary(jnp.array([True, False])).values.block_until_ready()


def test_errors_name_what_is_wrong(comm):
    system = grid_system(comm)
    A, n = system.matrix, system.pattern.n_local
    fixed = FIXED[system.mine]
    with pytest.raises(ValueError, match=rf"a boolean for each of its {n} rows"):
        A.at_boundary(jnp.zeros(n + 1, bool))
    with pytest.raises(ValueError, match=rf"a boolean for each of its {n} rows"):
        A.at_boundary(jnp.zeros(n))
    with pytest.raises(ValueError, match=rf"owns {n} rows. Give"):
        A.at_boundary(fixed, jnp.zeros(n + 1))
    with pytest.raises(ValueError, match="Give a scalar or one value for each entry of b"):
        A.at_boundary(fixed, system.b, jnp.zeros(n + 1))
    with pytest.raises(ValueError, match="values are given without b"):
        A.at_boundary(fixed, values=1.0)
    tall = Pattern.from_coo([comm.rank], [0], 1, comm, n_local_columns=2)
    with pytest.raises(ValueError, match="the matrix must be square"):
        Matrix(tall, jnp.ones(1)).at_boundary(jnp.ones(1, bool))
