"""The package examples/tridiagonal, which stands on public names only."""

from __future__ import annotations

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from helpers import close, found_on
from mpigrad.communicator import Communicator
from product_space import operand, prove, prove_second_order

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "tridiagonal"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))


def dense(lower, diagonal, upper):
    """The matrix of all ranks, from their rows in order."""
    return (
        jnp.diag(diagonal.ravel())
        + jnp.diag(lower.ravel()[1:], -1)
        + jnp.diag(upper.ravel()[:-1], 1)
    )


def solved(comm: Communicator):
    from tridiagonal import Tridiagonal, solve

    def f(x):
        return solve(Tridiagonal(x[0], 4 + x[1], x[2]), x[3], comm)

    def F(X):
        A = dense(X[:, 0], 4 + X[:, 1], X[:, 2])
        return jnp.linalg.solve(A, X[:, 3].ravel()).reshape(X[:, 3].shape)

    return f, F


@pytest.mark.thin(2, 3, reason="inner ranks have two neighbours")
def test_a_solve_is_that_of_the_whole_matrix_with_its_derivatives(comm):
    prove(*solved(comm), comm, "jit", shape=(4, 3))


@pytest.mark.full("the first order is in make test")
def test_second_derivatives(comm):
    prove_second_order(*solved(comm), comm, shape=(4, 3))


def test_a_batch_is_solved_one_by_one(comm):
    f, F = solved(comm)
    x, X = operand(comm, (4, 3))
    batch = jnp.stack([x, 0.5 * x])
    expected = jnp.stack([F(X), F(0.5 * X)], 1)[comm.rank]
    close(mg.vmap(f)(batch), expected)


def test_a_rank_that_is_constant_takes_part(comm):
    """The gradient in one rank's rows needs the other ranks' adjoint messages."""
    f, F = solved(comm)
    x, X = operand(comm, (4, 3))

    def loss(t):
        return jnp.sum(f(t * x if comm.rank == 0 else x) ** 2)

    scale = jnp.ones(comm.size)
    expected = jax.grad(lambda t: jnp.sum(F(X * scale.at[0].set(t)[:, None, None]) ** 2))(1.0)
    found = mg.grad(loss)(1.0)
    close(found, expected if comm.rank == 0 else 0.0, 1e-9)


def test_the_count_of_negative_eigenvalues(comm):
    from tridiagonal import Tridiagonal, count_negative

    x, X = operand(comm, (2, 4))
    A = dense(X[:, 0], X[:, 1], np.append(np.asarray(X[:, 0]).ravel()[1:], 0.0))
    rows = Tridiagonal(x[0], x[1], x[0])
    for shift in (-0.5, 0.0, 1.0):
        expected = int(np.sum(np.linalg.eigvalsh(A) < shift))
        assert int(count_negative(rows, shift, comm)) == expected
        assert int(mg.jit(lambda A, s: count_negative(A, s, comm))(rows, shift)) == expected
    gradient = mg.grad(lambda s: s * count_negative(rows, s, comm))(0.5)
    assert float(gradient) == int(count_negative(rows, 0.5, comm))


def test_a_rank_with_one_row_is_an_error_on_all(comm):
    from tridiagonal import Tridiagonal, solve

    rows = jnp.ones(1 if comm.rank == comm.size - 1 else 3)
    with pytest.raises(ValueError, match=found_on(comm, comm.size - 1, "tridiagonal.solve at ")):
        solve(Tridiagonal(rows, rows, rows), rows, comm)


@pytest.mark.ranks(1)
def test_it_uses_public_names_only():
    for file in (PACKAGE / "tridiagonal").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpigrad"):
                assert node.module == "mpigrad.extend"
            elif isinstance(node, ast.Import):
                assert all(name.name in ("jax", "jax.numpy", "mpigrad") for name in node.names)
