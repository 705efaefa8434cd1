"""Solves by PETSc: factorizations and iterations, their derivatives, and what goes wrong."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import System, _on_ranks, grid_system, stripes

import mpigrad as mg
from helpers import close
from mpigrad.sparse import PCG, Jacobi, Matrix, PETSc, Result, solve, why_no_petsc
from mpigrad.sparse.matrix.products import transposed

needs_petsc = pytest.mark.skipif(bool(why_no_petsc()), reason=why_no_petsc())
LU = PETSc("-ksp_type preonly -pc_type lu -pc_factor_mat_solver_type mumps", rtol=1e-12)


def saddle(comm) -> System:
    """[[A, Bᵀ], [B, 0]] without symmetry: a zero diagonal, of which multigrid makes nothing."""
    free, bound = 14, 6
    generator = np.random.default_rng(2)
    A = 0.3 * generator.standard_normal((free, free)) + 4 * np.eye(free)
    B = generator.standard_normal((bound, free))
    dense = np.block([[A, B.T], [B + 0.1, np.zeros((bound, bound))]])
    rows, columns = np.nonzero(dense)
    values, b = dense[rows, columns], generator.standard_normal(free + bound)
    return _on_ranks(comm, (rows, columns, values), b, stripes(free + bound, comm.size))


def derivatives(f, kit):
    """Value and tangent of f, gradient of a loss, and its derivative along the direction."""

    def of(p, t):
        gradient = kit.grad(lambda p: jnp.sum(jnp.sin(f(*p))))
        return *kit.jvp(lambda p: f(*p), (p,), (t,)), *kit.jvp(gradient, (p,), (t,))

    return of


@needs_petsc
@pytest.mark.parametrize("options", ["lu", "-ksp_type gmres -pc_type none"])
def test_all_derivatives_are_those_of_the_dense_solve(comm, options):
    """To second order. Factors are made once, whatever is solved with them."""
    system = saddle(comm)
    solver = LU if options == "lu" else PETSc(options, rtol=1e-13)
    generator = np.random.default_rng(3)
    dv, db = generator.standard_normal(len(system.rows)), generator.standard_normal(20)
    mine = lambda v, b: (v[system.entries], b[system.mine])
    solution = lambda v, b: solve(Matrix(system.pattern, v), b, solver)

    got = mg.jit(derivatives(lambda v, b: solution(v, b).value, mg))(
        (system.values, system.b), mine(dv, db)
    )
    dense = lambda v, b: jnp.linalg.solve(system.dense(v), b)
    expected = jax.jit(derivatives(dense, jax))((system.all_values, system.all_b), (dv, db))
    for part, whole in zip(got[:2], expected[:2], strict=True):
        close(part, whole[system.mine], 1e-9)
    for part, whole in zip(got[2:], expected[2:], strict=True):
        close(part, mine(*whole), 1e-8)
    assert solution(system.values, system.b).stats["setups"] == 1
    # The adjoint of a factorization makes no factors of the transpose.
    (of_transpose,) = transposed(system.pattern).solver_systems.values()
    assert of_transpose.setups == (0 if options == "lu" else 1)
    if options == "lu":
        solved = lambda v, b: solution(v, b).value
        assert mg.dot_test(solved, system.values, system.b).error < 1e-11
        several = solve(system.matrix, jnp.stack([system.b, 2 * system.b], 1), LU)
        close(several.value[:, 1], 2 * got[0], 1e-9)
        loss = lambda s, b: jnp.sum(solution(s * system.values, b).value ** 2)
        batch = mg.vmap(mg.grad(loss, argnums=1), in_axes=(0, None))(jnp.array([1.0, 2]), system.b)
        close(batch[0], 4 * batch[1], 1e-9)


@needs_petsc
def test_symmetric_and_singular(comm):
    """The adjoint takes the matrix itself. PETSc gets the null space."""
    system = grid_system(comm, (12, 11))
    free = np.where(system.rows == system.columns, 0.3, 0)
    A = Matrix(system.pattern, jnp.asarray((system.all_values - free)[system.entries]))
    b = system.b - mg.allreduce(jnp.sum(system.b)) / 132

    def gradient(solver):
        def loss(b):
            return jnp.sum(solve(A, b, solver, nullspace="constants").value ** 3)

        return mg.grad(loss)(b)

    solver = PETSc({"ksp_type": "cg", "pc_type": "gamg"}, rtol=1e-11, symmetric=True)
    close(gradient(solver), gradient(PCG(rtol=1e-11, preconditioner=Jacobi())), 1e-7)
    solution = solve(A, b, solver, nullspace="constants")
    assert solution.stats["setups"] == 1
    assert abs(mg.allreduce(jnp.sum(solution.value))) < 1e-9
    guess = solve(A, b, solver, solution.value, nullspace="constants")
    assert guess.stats["num_steps"] == 0
    skew = Matrix(A.pattern, A.values * (1 + 0.1 * jnp.sin(jnp.arange(A.pattern.nnz))))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the matrix is not symmetric"):
        solve(skew, b, solver)
    huge = skew.at_boundary(jnp.arange(len(b)) < 1, b)[0].scale_rows(
        jnp.where(jnp.arange(len(b)) < 1, 1e20, 1.0)
    )
    assert solve(huge, b, solver, throw=False).result == Result.NOT_SYMMETRIC


@needs_petsc
def test_faults_are_errors_on_all_ranks(comm):
    system = grid_system(comm, (12, 11))
    A, b = system.matrix, system.b
    for options, message in {
        "-pc_tpye lu": "did not read -pc_tpye: .* Check the names",
        "-pc_type foo": "foo",
    }.items():
        for _ in range(2):  # also when it is tried again
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                solve(A, b, PETSc(options))
    few = PETSc("-ksp_type cg -pc_type none", max_steps=2)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"did not converge: .*max_steps=2"):
        solve(A, b, few)
    assert solve(A, b, few, throw=False).stats["num_steps"] == 2
    for matrix, side in ((Matrix(A.pattern, A.values * jnp.nan), b), (A, b * jnp.nan)):
        assert solve(matrix, side, LU, throw=False).result == Result.NOT_FINITE
    zero = solve(Matrix(A.pattern, 0 * A.values), b, LU, throw=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="PCSETUP_FAILED, FACTOR_"):
        solve(Matrix(A.pattern, 0 * A.values), b, LU)
    assert zero.result == Result.BREAKDOWN
    assert jnp.isnan(zero.value).all()
    if comm.size > 1:
        mine = PETSc("-ksp_type cg", rtol=1e-6 if comm.rank else 1e-7)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank 1 has .*1e-06"):
            solve(A, b, mine)
    single = Matrix(A.pattern, A.values.astype("float32"))
    with pytest.raises(TypeError, match="this PETSc solves in float64, got float32"):
        solve(single, b.astype("float32"), LU)
    assert solve(A, 0 * b, LU).stats["num_steps"] == 0
    assert solve(A, b, LU).result == Result.SUCCESSFUL


@pytest.mark.ranks(1, 2)
def test_settings(comm):
    for options, message in {
        "-ksp_rtol 1e-3": r"-ksp_rtol is rtol= here",
        "pc_type lu": "expected an option such as -pc_type, got 'pc_type'",
        3: "options must be a text or a dictionary, got 3",
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            PETSc(options)
    with pytest.raises(TypeError, match="PETSc"):
        solve(lambda v: 2 * v, jnp.ones(2), PETSc())
    with pytest.raises(TypeError, match="PETSc is final"):
        dataclasses.make_dataclass("Mine", [], bases=(PETSc,))
    if why_no_petsc():
        system = grid_system(comm)
        with pytest.raises(RuntimeError, match=re.escape(why_no_petsc())):
            solve(system.matrix, system.b, PETSc())
