"""Singular systems compared with dense ones that the null space completes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import grid_system
from whole import Entries, prove, rows_of

import mpigrad as mg
from helpers import close
from mpigrad.sparse import (
    GMRES,
    PCG,
    Jacobi,
    Matrix,
    NullSpace,
    Operator,
    Result,
    hypre_available,
    newton,
    solve,
)

OWN = {"PCG": PCG(rtol=1e-12, preconditioner=Jacobi())}
AMG = {"PCG by hypre": PCG(rtol=1e-12), "GMRES by hypre": GMRES(rtol=1e-12)}
SOLVERS = OWN | (AMG if hypre_available() else {})
RIGHT = GMRES(rtol=1e-13, restart=40, preconditioner=Jacobi())


def laplacian(comm):
    """A weighted graph Laplacian on the ranks, and whole."""
    system = grid_system(comm)
    matrix = system.dense(system.all_values)
    whole = np.array(matrix - np.diag(np.diag(matrix)))
    whole -= np.diag(whole.sum(axis=1))
    entries = Entries.of(system.pattern)
    return Matrix(system.pattern, jnp.asarray(entries.pick(whole)[entries.mine])), whole


def completed(A, z, w, b):
    """The solution that is orthogonal to z, for the part of b that is orthogonal to w."""
    z, w = z / jnp.linalg.norm(z), w / jnp.linalg.norm(w)
    b = b - w * (w @ b)
    A = A - jnp.outer(w, w @ A)
    A = A - jnp.outer(A @ z, z)
    return jnp.linalg.solve(A + jnp.outer(w, z), b)


@pytest.mark.long("derivatives in vectors, on both sides; test_errors solves too")
def test_any_matrix_and_own_vectors(comm):
    """Value, tangent, gradient and Hessian, also in the vectors, which depend on the matrix."""
    L, whole = laplacian(comm)

    def f(p, q, b):
        d, e = 2 + jnp.sin(p), 2 + jnp.cos(q)
        null = NullSpace(1 / e, left=1 / d, project=True)
        return solve(L.scale_rows(d).scale_columns(e), b, RIGHT, nullspace=null).value

    def F(p, q, b):
        d, e = 2 + jnp.sin(p), 2 + jnp.cos(q)
        return completed(d[:, None] * whole * e, 1 / e, 1 / d, b)

    operands = [rows_of(L.pattern, seed=k) for k in (1, 2, 3)]
    prove(f, F, operands, operands[0].mine, rtol=1e-8)


@pytest.mark.long("the gradient of a solve; test_errors solves too")
@pytest.mark.cases("PCG", reason="tests/fem/test_fem_equations.py has null spaces with hypre")
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_gradients_of_symmetric_systems(comm, solver):
    """The gradient of a consistent solve: its cotangent is not in the range."""
    L, whole = laplacian(comm)
    rows = rows_of(L.pattern)
    weights, ones = np.cos(np.arange(30)), np.ones(30)
    b = rows.whole - rows.whole.mean()

    def f(values, b):
        return solve(Matrix(L.pattern, values), b, solver, nullspace="constants").value

    here = jnp.asarray(b[rows.mine])
    share = lambda v, b: jnp.sum(jnp.asarray(weights[rows.mine]) * f(v, b))
    value, got = mg.jit(mg.value_and_grad(share, argnums=(0, 1)))(L.values, here)
    whole_loss = lambda A, b: weights @ completed(A, ones, ones, b)
    expected = jax.jit(jax.grad(whole_loss, (0, 1)))(jnp.asarray(whole), jnp.asarray(b))
    close(value, weights @ np.linalg.pinv(whole) @ b, 1e-9)
    entries = Entries.of(L.pattern)
    close(got[0], entries.pick(expected[0])[entries.mine], 1e-8)
    close(got[1], expected[1][rows.mine], 1e-8)


@pytest.mark.long("the gradient through Newton's method; the errors are in test_errors")
@pytest.mark.cases("free", reason="tests/fem/test_fem_equations.py has a nonlinear equation")
@pytest.mark.parametrize("way", ["free", "jacobian"])
def test_functions_and_newton(comm, way):
    """A matrix-free solve, and a nonlinear one with and without its Jacobian."""
    L, whole = laplacian(comm)
    rows = rows_of(L.pattern)
    b, z = rows.whole - rows.whole.mean(), np.ones(30)
    here = jnp.asarray(b[rows.mine])
    operator = Operator(lambda v: L @ v, comm=comm)
    x = solve(operator, here, PCG(rtol=1e-12, preconditioner=None), nullspace="constants").value
    close(x, (np.linalg.pinv(whole) @ b)[rows.mine], 1e-9)

    def F(x, theta, b):
        return L @ x + theta * (L @ jnp.sin(L @ x)) - b

    def J(x, theta, b):
        return L + theta * (
            L @ L.scale_columns(jnp.ones(rows.part.shape)).scale_rows(jnp.cos(L @ x))
        )

    def dense(theta, b):
        def step(x):
            y = whole @ x
            F = y + theta * whole @ jnp.sin(y) - b
            return x - completed(whole + theta * whole @ (jnp.cos(y)[:, None] * whole), z, z, F)

        x = jnp.zeros(30)
        for _ in range(8):
            x = jax.lax.stop_gradient(step(x))
        return step(x)

    weights = np.cos(np.arange(30))

    def whole_share(theta, b):
        x = dense(theta, b)
        return weights @ x, x

    whole_gradient = jax.jit(jax.grad(whole_share, (0, 1), has_aux=True))
    expected, whole_x = whole_gradient(0.05, jnp.asarray(b))
    solver = GMRES(rtol=1e-12, restart=40, preconditioner=None)

    def share(theta, b):
        x = newton(
            F, rows.part, solver, (theta, b), jacobian=J if way == "jacobian" else None,
            rtol=1e-11, comm=comm, nullspace=jnp.ones_like(b),
        ).value  # fmt: skip
        return jnp.sum(jnp.asarray(weights[rows.mine]) * x), x

    (_, x), got = mg.jit(mg.value_and_grad(share, (0, 1), has_aux=True))(0.05, here)
    close(x, whole_x[rows.mine], 1e-9)
    close(comm.mpi.allreduce(float(got[0])), float(expected[0]), 1e-8)
    close(got[1], expected[1][rows.mine], 1e-8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no x solves F"):
        newton(F, here, solver, (0.05, here + 1), nullspace="constants", comm=comm)


def test_errors(comm):
    L, _ = laplacian(comm)
    rows = rows_of(L.pattern)
    ones, solver = jnp.ones(L.pattern.n_local), RIGHT
    b = jnp.asarray((rows.whole - rows.whole.mean())[rows.mine])
    for match, matrix, rhs, null in (
        (r"along the left null space is 16\.43.*, and \|b\| is", L, b + 3, "constants"),
        (r"\|A z\| is .* for a combination", L, b, jnp.asarray(rows.part)),
        ("linearly dependent", L, b, [ones, 2 * ones]),
        ("Give the left null space", L.scale_rows(2 + jnp.sin(rows.part)), b, "constants"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            solve(matrix, rhs, solver, nullspace=null)
    failed = solve(L, b + 3, solver, nullspace="constants", throw=False)
    assert failed.result == Result.INCONSISTENT
    assert bool(jnp.isnan(failed.value).all())
    with pytest.raises(ValueError, match="expected 'constants' or vectors, got 'ones'"):
        solve(L, b, solver, nullspace="ones")
    with pytest.raises(ValueError, match="Leave out left"):
        solve(L, b, OWN["PCG"], nullspace=NullSpace("constants", left=ones))


def test_a_complex_null_vector_and_a_cotangent_along_it(comm):
    """The transpose of a Hermitian matrix has the conjugate null vectors."""
    L, _ = laplacian(comm)
    phase = jnp.exp(1j * jnp.arange(L.pattern.n_local))
    A = Matrix(L.pattern, L.values.astype(complex))
    A = A.scale_rows(phase).scale_columns(phase.conj())
    b, d = phase * np.random.default_rng(comm.rank).standard_normal((2, len(phase)))

    def share(b, weights):
        null = NullSpace(phase, project=True)
        return jnp.sum((solve(A, b, RIGHT, nullspace=null).value * weights.conj()).real)

    program = mg.jit(mg.value_and_grad(share))
    value, along_d = program(d, d)
    slope = mg.allreduce(jnp.vdot(program(b, d)[1].conj(), d).real)
    close(slope, value, 1e-8)  # the solution is linear in b, and values are sums over the ranks
    close(along_d, program(b, d)[1], 1e-8)
    assert float(mg.max_norm(jnp.abs(program(b, phase)[1]))) < 1e-12


@pytest.mark.thin(3)  # on two, rounding leaves nothing
@pytest.mark.parametrize("solver", OWN.values(), ids=OWN)
def test_what_lies_in_the_null_space_is_zero(comm, solver):
    """Of it only rounding is left by a projection, which no method can solve for."""
    L, _ = laplacian(comm)
    ones = jnp.ones(L.pattern.n_local)
    null = NullSpace("constants", project=True)

    def total(b):
        x = solve(L, b, solver, nullspace=null).value
        return jnp.sum(x), x

    program = mg.jit(mg.grad(total, has_aux=True))
    assert not jnp.any(program(ones)[1])
    assert not jnp.any(program(jnp.sin(jnp.arange(len(ones)) + comm.rank))[0])
