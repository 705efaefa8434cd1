"""Eigenpairs by SLEPc: the values, vectors and derivatives of LOBPCG's, and what goes wrong."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import grid_system

import mpigrad as mg
from helpers import close
from mpigrad.grid import Grid
from mpigrad.sparse import (
    Jacobi,
    Matrix,
    Pattern,
    Result,
    SLEPc,
    eigh,
    why_no_petsc,
    why_no_slepc,
)

needs_slepc = pytest.mark.skipif(bool(why_no_slepc()), reason=why_no_slepc())
MUMPS = "-st_pc_type lu -st_pc_factor_mat_solver_type mumps"
INVERSE = SLEPc(f"-st_type sinvert {MUMPS}")


def squares(comm, n=6, mass=0.5):
    """The five-point Laplacian of a square, with double eigenvalues, and a mass matrix."""
    grid = Grid((n, n), (1.0, 1.0), comm=comm)
    pattern = Pattern.from_stencil(grid, [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])
    full = lambda *entries: [jnp.full(grid.local_shape, v) for v in entries]
    A = Matrix.assemble(pattern, full(4.0, -1.0, -1.0, -1.0, -1.0))
    return A, Matrix.assemble(pattern, full(4.0, mass, mass, mass, mass))


@needs_slepc
def test_pairs_and_gradients_are_those_of_lobpcg(comm):
    """A generalized problem, compiled: derivatives with respect to both matrices."""
    A = grid_system(comm).matrix
    M = A + 3 * A  # the pattern is another object
    d = jnp.sin(A.pattern.offset + jnp.arange(A.pattern.n_local))
    a, b = A.scale_rows(2 + d).scale_columns(2 + d), M.scale_rows(3 - d).scale_columns(3 - d)

    def derivatives(solver):
        def loss(p, q):
            pair = Matrix(a.pattern, p), Matrix(b.pattern, q)
            solution = eigh(*pair, 3, preconditioner=Jacobi(), rtol=1e-11, solver=solver)
            values, vectors = solution.value
            weights = jnp.array([1.0, -2.0, 0.7]) * values
            return jnp.sum(jnp.sin(vectors + vectors**2) @ weights), solution

        return mg.jit(mg.value_and_grad(loss, (0, 1), has_aux=True))(a.values, b.values)

    (value, solution), gradient = derivatives(INVERSE)
    (expected, other), expected_gradient = derivatives(None)
    close(solution.value.values, other.value.values, 1e-12)
    close(solution.value.vectors, other.value.vectors, 1e-8)  # with their signs
    close(value, expected, 1e-8)
    close(gradient, expected_gradient, 1e-6)
    close(solution.stats["next_value"], other.stats["next_value"], 1e-6)
    assert max(solution.stats["relative_residual"]) <= 1e-11


@needs_slepc
@pytest.mark.parametrize("options", ["", f"-st_type sinvert {MUMPS}"])
def test_equal_values_are_complete(comm, options):
    """Without a check Krylov-Schur returns one copy of a double value."""
    A, _ = squares(comm, 12)
    pairs = lambda v, k: eigh(Matrix(A.pattern, v), k=k, preconditioner=None, solver=SLEPc(options))
    lowest = 2 - 2 * np.cos(np.arange(1, 5) * np.pi / 13)
    expected = np.sort(np.add.outer(lowest, lowest).ravel())
    solution = pairs(A.values, 4)
    close(solution.value.values, expected[:4], 1e-12)
    close(solution.stats["next_value"], expected[4], 1e-10)
    group = mg.grad(lambda v: jnp.sum(pairs(v, 3).value.values[1:]) / comm.size)(A.values)
    close(mg.allreduce(jnp.sum(group * A.values), comm=comm), expected[1:3].sum(), 1e-8)
    # Derivatives of the projector to complete groups, which has no choice of vectors.
    c = jnp.cos(A.pattern.offset + jnp.arange(A.pattern.n_local))

    def projected(p):
        d = jnp.exp(p)
        vectors = pairs(A.scale_rows(d).scale_columns(d).values, 3).value.vectors
        return vectors @ mg.allreduce(c @ vectors, comm=comm)

    mg.dot_test(mg.jit(projected), 0 * c, rtol=1e-7, comm=comm)
    loss = mg.jit(lambda p: jnp.sum(projected(p) ** 2))
    assert min(mg.taylor_test(loss, 0 * c, step=1e-2, halvings=2, comm=comm).rates_with) > 1.9
    with pytest.raises(jax.errors.JaxRuntimeError, match="Take k larger or smaller"):
        mg.grad(lambda v: pairs(v, 2).value.values[1])(A.values)


@needs_slepc
def test_fixed_rows_and_the_other_end(comm):
    A, M = squares(comm)
    fixed = np.arange(A.pattern.n_local) % 5 == 0
    for which, shift in (("smallest", 0.0), ("largest", 9.0)):
        same = {"k": 4, "fixed": fixed, "which": which, "shift": shift, "rtol": 1e-10}
        got = eigh(A, M, **same, solver=INVERSE)
        expected = eigh(A, M, **same, preconditioner=None)
        close(got.value.values, expected.value.values, 1e-12)
        assert not got.value.vectors[fixed].any()


@needs_slepc
def test_all_values_and_a_singular_matrix(comm):
    small, _ = squares(comm, 3)
    whole = eigh(small, k=9, solver=SLEPc())
    one = 2 - 2 * np.cos(np.arange(1, 4) * np.pi / 4)
    close(whole.value.values, np.sort(np.add.outer(one, one).ravel()), 1e-12)
    assert np.isinf(whole.stats["next_value"])
    # Constants are in the null space.
    A, _ = squares(comm)
    ones = jnp.ones(A.pattern.n_local)
    index = A.pattern.diagonal_index
    free = Matrix(A.pattern, A.values.at[index].add(-(A @ ones)))
    values = eigh(free, k=2, shift=0.1, solver=INVERSE).value.values
    close(values, np.array([0, 2 - 2 * np.cos(np.pi / 6)]), 1e-12)


@needs_slepc
def test_faults_are_errors_on_all_ranks(comm):
    A, M = squares(comm)
    few = {"k": 3, "solver": SLEPc("-eps_ncv 5"), "max_steps": 2}
    end = {"k": 3, "solver": INVERSE, "which": "largest"}  # -A is not positive definite
    for match, matrix, options in (
        ("did not read -eps_tpye", A, {"solver": SLEPc("-eps_tpye gd")}),
        ("Unknown EPS type given: foo", A, {"solver": SLEPc("-eps_type foo")}),
        ("SLEPc failed: DIVERGED_ITS, . of 3 pairs after 2 steps", A, few),
        ("below -shift was found.* Give a larger shift= than 0", A, end),
        ("A holds NaN", A * np.nan, {"solver": INVERSE}),
        ("SLEPc failed: .*If A . shift B is singular", 0 * A, {"solver": INVERSE}),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.compile(match, re.DOTALL)):
            eigh(matrix, M, **options)
    broken = eigh(A, **few, throw=False)
    assert broken.result == Result.BREAKDOWN and broken.stats["num_steps"] == 2
    assert jnp.isnan(broken.value.values).all()
    # SLEPc sees no residual of A if its inverse is inaccurate.
    loose = SLEPc("-st_type sinvert -st_ksp_type cg -st_pc_type jacobi -st_ksp_rtol 1e-2")
    assert eigh(A, k=2, solver=loose, throw=False).result == Result.INACCURATE


@needs_slepc
def test_settings_that_do_not_fit_are_errors_on_all_ranks(comm):
    A, _ = squares(comm)
    if comm.size > 1:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank 1 has .*eps_ncv 21"):
            eigh(A, solver=SLEPc({"eps_ncv": 20 + comm.rank}))
    with pytest.raises(TypeError, match="SLEPc: this PETSc solves in float64, got float32"):
        eigh(Matrix(A.pattern, A.values.astype("float32")), solver=INVERSE)
    assert eigh(A, solver=INVERSE).result == Result.SUCCESSFUL


@pytest.mark.ranks(1, 2)
def test_settings(comm):
    for options, message in {
        "-eps_nev 3": "SLEPc: -eps_nev is k= here",
        "-eps_tol 1e-3": "-eps_tol is rtol= here",
        "-eps_max_it 3": "-eps_max_it is max_steps= here",
        "-eps_largest_real": "-eps_largest_real is which= here",
        "st_type sinvert": "SLEPc: expected an option such as -eps_type, got 'st_type'",
        3: "SLEPc: options must be a text or a dictionary, got 3",
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            SLEPc(options)
    A, _ = squares(comm)
    with pytest.raises(TypeError, match=r"eigh: solver must be SLEPc\(\.\.\.\) or None, got 'gd'"):
        eigh(A, solver="gd")
    if why_no_slepc():
        assert why_no_petsc() in why_no_slepc()
        with pytest.raises(RuntimeError, match=re.escape(why_no_slepc())):
            eigh(A, solver=SLEPc())
