"""Solves with blocks: saddle points by MINRES, GMRES and PETSc, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import _on_ranks, grid_system, stripes

import mpigrad as mg
from helpers import close
from mpigrad.grid import Grid
from mpigrad.sparse import (
    GMRES,
    LSC,
    MINRES,
    PCG,
    PFMG,
    BlockDiagonal,
    Blocks,
    BlockTriangular,
    BoomerAMG,
    BoxMG,
    Jacobi,
    Matrix,
    Pattern,
    PETSc,
    Result,
    hypre_available,
    solve,
    why_no_petsc,
)
from mpigrad.sparse.solvers.methods import Cycle

ROWS, BOUND = 30, 8
CYCLE = BoomerAMG() if hypre_available() else Jacobi()
SOLVERS = {
    "MINRES": MINRES(rtol=1e-13, preconditioner=BlockDiagonal(CYCLE, Jacobi())),
    "GMRES": GMRES(rtol=1e-13, preconditioner=BlockTriangular(Jacobi(), LSC(Jacobi()))),
    "flexible": GMRES(
        rtol=1e-13,
        flexible=True,
        preconditioner=BlockTriangular(PCG(rtol=1e-2, preconditioner=Jacobi()), Jacobi()),
    ),
    "PETSc": PETSc("-ksp_type preonly -pc_type lu -pc_factor_mat_solver_type mumps", rtol=1e-12),
}


class Saddle:
    """[[A, Cᵀ], [C, 0]], where A is a grid's matrix and C takes differences of its rows."""

    def __init__(self, comm):
        self.comm = comm
        self.free = grid_system(comm, empty=comm.size - 1 if comm.size > 2 else None)
        generator = np.random.default_rng(4)
        i = np.repeat(np.arange(BOUND), 3)
        j = (3 * i + np.tile([0, 4, 9], BOUND)) % ROWS
        entries = (i, j, generator.uniform(0.5, 1.5, len(i)) * np.tile([1, -1, 1], BOUND))
        shares = stripes(BOUND, comm.size), stripes(ROWS, comm.size, self.empty)
        self.bound = _on_ranks(comm, entries, generator.standard_normal(BOUND), *shares)

    @property
    def empty(self):
        return self.comm.size - 1 if self.comm.size > 2 else None

    def blocks(self, shift, weights):
        """The matrix for a shift of this rank's diagonal of A, and weights of its rows of C."""
        pattern = self.free.pattern
        at = jnp.zeros(pattern.nnz).at[pattern.diagonal].set(shift)
        A = Matrix(pattern, self.free.values + at)
        C = self.bound.matrix.scale_rows(weights)
        return Blocks([[A, C.T], [C, None]], schur=self.eye())

    def eye(self):
        system = _on_ranks(
            self.comm, (*[np.arange(BOUND)] * 2, np.ones(BOUND)), np.ones(BOUND),
            stripes(BOUND, self.comm.size),
        )  # fmt: skip
        return system.matrix

    def dense(self, shift, weights):
        A = self.free.dense(self.free.all_values) + jnp.diag(shift)
        C = weights[:, None] * self.bound.dense(self.bound.all_values)
        return jnp.block([[A, C.T], [C, jnp.zeros((BOUND, BOUND))]])

    def mine(self, shift, weights):
        return jnp.asarray(shift[self.free.mine]), jnp.asarray(weights[self.bound.mine])


def test_products_and_merged(comm):
    system = Saddle(comm)
    shift, weights = np.linspace(0, 1, ROWS), np.linspace(1, 2, BOUND)
    K, D = system.blocks(*system.mine(shift, weights)), system.dense(shift, weights)
    x, p = np.random.default_rng(0).standard_normal((2, ROWS))
    u, v = K @ system.mine(x, p)
    expected = D @ np.concatenate([x, p[:BOUND]])
    close(u, expected[:ROWS][system.free.mine], 1e-13)
    close(v, expected[ROWS:][system.bound.mine], 1e-13)
    assert K.shape == (ROWS + BOUND,) * 2
    assert K.local_sizes == (system.free.pattern.n_local, system.bound.pattern.n_local)
    for part, turned in zip(K @ (u, v), K.T @ (u, v), strict=True):
        close(part, turned, 1e-12)  # it is symmetric
    assert K.merged().pattern is K.merged().pattern
    of_both = lambda *operands: K_of(*operands[:2]) @ operands[2:]
    K_of, parts = system.blocks, (*system.mine(shift, weights), u, v)
    assert mg.dot_test(of_both, *parts).error < 1e-12


def test_residuals_are_scaled_by_the_diagonal(comm):
    """Three steps of GMRES: the least scaled residual in the Krylov space."""
    system = Saddle(comm)
    shift, weights = np.logspace(0, 4, ROWS), np.linspace(1, 2, BOUND)
    K, D = system.blocks(*system.mine(shift, weights)), system.dense(shift, weights)
    b = np.concatenate([system.free.all_b, system.bound.all_b])
    jacobi = BlockTriangular(Jacobi(), Jacobi())
    solver = GMRES(max_steps=3, preconditioner=jacobi)
    solution = solve(K, (system.free.b, system.bound.b), solver, throw=False)
    w = np.concatenate([np.diag(D)[:ROWS] ** -0.5, np.ones(BOUND)])
    for field in (slice(ROWS), slice(ROWS, None)):  # to about 1 by a power of two
        w[field] /= 2.0 ** np.frexp(w[field].max())[1]
    # The triangle of the diagonal of A, Cᵀ and minus the identity.
    M = np.diag([*np.diag(D)[:ROWS], *-np.ones(BOUND)])
    M[:ROWS, ROWS:] = D[:ROWS, ROWS:]
    vectors = [np.linalg.solve(M, b)]
    for _ in range(2):
        vectors.append(np.linalg.solve(M, D @ vectors[-1]))
    span = np.linalg.qr(np.stack(vectors, axis=1))[0]
    x = span @ np.linalg.lstsq(w[:, None] * (D @ span), w * b)[0]
    close(solution.value, (x[:ROWS][system.free.mine], x[ROWS:][system.bound.mine]), 1e-9)
    relative = np.linalg.norm(b - D @ x) / np.linalg.norm(b)
    close(solution.stats["relative_residual"], relative, 1e-9)
    # The two-norm may rise from restart to restart while the scaled one falls.
    K = system.blocks(*system.mine(np.logspace(0, 6, ROWS), weights))
    slow = GMRES(max_steps=200, restart=8, preconditioner=jacobi)
    end = solve(K, (system.free.b, system.bound.b), slow, throw=False)
    assert end.result == Result.MAX_STEPS_REACHED


@pytest.mark.cases("MINRES", "GMRES", "PETSc", reason="flexible: the page has it, in GMRES's loop")
@pytest.mark.parametrize("name", SOLVERS)
def test_derivatives_are_those_of_the_dense_solve(comm, name):
    """In the blocks and both right-hand sides, forward and reverse."""
    if name == "PETSc" and why_no_petsc():
        pytest.skip(why_no_petsc())
    system, generator = Saddle(comm), np.random.default_rng(1)
    whole = [generator.uniform(1, 2, n) for n in (ROWS, BOUND, ROWS, BOUND)]
    along = [generator.standard_normal(n) for n in (ROWS, BOUND, ROWS, BOUND)]
    mine = lambda four: (*system.mine(*four[:2]), *system.mine(*four[2:]))

    def x_of(shift, weights, f, g):
        return solve(system.blocks(shift, weights), (f, g), SOLVERS[name]).value

    def X_of(shift, weights, f, g):
        x = jnp.linalg.solve(system.dense(shift, weights), jnp.concatenate([f, g]))
        return x[:ROWS], x[ROWS:]

    def everything(f, kit):
        loss = lambda *p: sum(jnp.sum(jnp.sin(v)) for v in f(*p))
        forward = kit.jvp if name == "MINRES" else lambda f, p, t: (f(*p), f(*p))
        return lambda p, t: (*forward(f, p, t), kit.grad(loss, argnums=(0, 1, 2, 3))(*p))

    got = mg.jit(everything(x_of, mg))(mine(whole), mine(along))
    expected = jax.jit(everything(X_of, jax))(tuple(whole), tuple(along))
    for part, all_of_it in zip(got[:2], expected[:2], strict=True):
        for v, V in zip(part, system.mine(*all_of_it), strict=True):
            close(v, V, 1e-9)
    for v, V in zip(got[2], mine(expected[2]), strict=True):
        close(v, V, 1e-8)


def test_null_space_of_one_field(comm):
    """A pressure that is known but for a constant: rows of C with the sum zero, and C @ Cᵀ."""
    if why_no_petsc():
        solvers = (SOLVERS["MINRES"],)
    else:
        schur = (
            "-pc_type fieldsplit -pc_fieldsplit_type schur -pc_fieldsplit_schur_precondition selfp"
        )
        inner = "-fieldsplit_0_pc_type bjacobi -fieldsplit_1_pc_type bjacobi"
        solvers = (SOLVERS["MINRES"], PETSc(f"-ksp_type fgmres {schur} {inner}", rtol=1e-12))
    n = stripes(9, comm.size)[comm.rank]
    first = comm.mpi.scan(n) - n
    i = first + np.arange(n)
    A = Matrix(Pattern.from_coo(i, i, n, comm), jnp.asarray(2.0 + i % 3))
    ring = Pattern.from_coo(np.repeat(i, 2), np.stack([i, (i + 1) % 9], 1).ravel(), n, comm)
    C = Matrix(ring, jnp.tile(jnp.array([-1.0, 1.0]), n)).T  # columns add up to zero
    K = Blocks([[A, C.T], [C, None]], schur=C @ C.T.scale_rows(1 / A.diagonal()))
    b = jnp.asarray(np.cos(i)), jnp.zeros(n)
    slopes = []
    for solver in solvers:
        space = (jnp.zeros(n), jnp.ones(n))
        u, p = solve(K, b, solver, nullspace=space).value
        loss = lambda f, s=solver, z=space: jnp.sum(
            solve(K, (f, b[1]), s, nullspace=z).value[1] ** 2
        )
        slopes.append(mg.grad(loss)(b[0]))
        assert abs(mg.allreduce(jnp.sum(p))) < 1e-9
        for left, right in zip(K @ (u, p), b, strict=True):
            close(left, right, 1e-9)
    close(slopes[-1], slopes[0], 1e-8)


@pytest.mark.skipif(not hypre_available(), reason="no hypre")
def test_one_cycle_of_multigrid(comm):
    """A linear map near the inverse, for vectors of any size, whose transpose is set up once."""
    grid = Grid((12, 10), (1.0, 1.0), comm=comm)
    pattern = Pattern.from_stencil(grid, [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)])
    ones = jnp.ones(grid.local_shape)
    A = Matrix.assemble(pattern, [5e3 * ones, *[-1e3 * ones] * 4])
    b = jnp.sin(jnp.arange(pattern.n_local) + 1.0 * comm.rank)
    x = solve(A, b, PCG(rtol=1e-12)).value
    for method in (BoomerAMG(), PFMG(), BoxMG()):
        z = solve(A, b, Cycle(method)).value
        away, size = mg.allreduce(jnp.stack([jnp.sum((z - x) ** 2), jnp.sum(x**2)]))
        assert away < 0.1 * size, method
        tiny = solve(A, 1e-250 * b, Cycle(method)).value
        close(1e250 * tiny, z, 1e-6 if method == BoxMG() else 1e-12)  # in single precision

    K = Blocks([[A, None], [None, A]])
    solver = GMRES(rtol=1e-12, preconditioner=BlockTriangular(BoomerAMG(), BoxMG()))

    @mg.jit
    def derivatives(b):
        loss = lambda f: sum(jnp.sum(v**2) for v in solve(K, (f, b), solver).value)
        return mg.jvp(mg.grad(loss), (b,), (b,))

    slope, change = derivatives(b)
    exact = 2 * solve(A, x, PCG(rtol=1e-12)).value  # A is symmetric
    close(slope, exact, 1e-9)
    close(change, exact, 1e-9)
    assert solve(A.T, b, PCG(preconditioner=BoomerAMG())).stats["setups"] == 1


def test_minres(comm):
    """Indefinite matrices, and preconditioners that are not definite."""
    system = grid_system(comm, (12, 11))
    at = jnp.zeros(system.pattern.nnz).at[system.pattern.diagonal].set(3.0)
    A = Matrix(system.pattern, system.values - at)  # eigenvalues of both signs
    solver = MINRES(rtol=1e-10)
    solution = solve(A, system.b, solver, throw=False)
    left = mg.allreduce(jnp.sum((A @ solution.value - system.b) ** 2))
    assert left < 1e-19 * mg.allreduce(jnp.sum(system.b**2))
    assert solve(A, 0 * system.b, solver, throw=False).stats["num_steps"] == 0
    skew = Matrix(A.pattern, A.values * (1 + 0.1 * jnp.sin(jnp.arange(A.pattern.nnz))))
    assert solve(skew, system.b, solver, throw=False).result == Result.NOT_SYMMETRIC
    ones = jnp.asarray(system.all_values - np.where(system.rows == system.columns, 0.3, 0))
    singular = Matrix(A.pattern, ones[system.entries])  # b is not in its range
    end = solve(singular, system.b, solver, throw=False)
    assert end.result == Result.STAGNATED
    assert end.stats["relative_residual"] < 1
    with pytest.raises(jax.errors.JaxRuntimeError, match="the preconditioner is not positive def"):
        solve(A, system.b, MINRES(preconditioner=Jacobi()))
    single = Matrix(A.pattern, A.values.astype("float32"))
    few = solve(single, system.b.astype("float32"), MINRES(max_steps=3), throw=False)
    assert (few.result, few.stats["num_steps"]) == (Result.MAX_STEPS_REACHED, 3)
    with pytest.raises(TypeError, match="MINRES: it solves real systems, got complex128"):
        solve(lambda v: 2 * v, system.b * 1j, MINRES())


def test_errors_name_what_is_wrong(comm):
    system = Saddle(comm)
    K = system.blocks(*system.mine(np.zeros(ROWS), np.ones(BOUND)))
    b = system.free.b, system.bound.b
    bare = Blocks(K.blocks)
    triangular = BlockTriangular(CYCLE, Jacobi())
    for call, message in {
        lambda: solve(bare, b, GMRES(preconditioner=triangular)): "of field 1 on the diagonal is",
        lambda: solve(K, b): "blocks have no default solver",
        lambda: solve(K, b, GMRES(preconditioner=Jacobi())): "Jacobi.. is for one matrix, got b",
        lambda: MINRES(preconditioner=triangular): "the preconditioner must be symmetric",
        lambda: solve(K.blocks[0][0], b[0], GMRES(preconditioner=triangular)): "got a Matrix",
        lambda: solve(K, b[::-1], MINRES()): "expected a vector of fields with the sizes",
        lambda: BlockDiagonal(CYCLE): "one solver for each field, got 1",
        lambda: BlockDiagonal(CYCLE, 3): "got 3 for field 1",
        lambda: BlockDiagonal(BoxMG(reuse="stale"), CYCLE): "one cycle has no residual that shows",
        lambda: BlockDiagonal(LSC(), CYCLE): "LSC is for the last field, got it for field 0",
        lambda: Blocks([[K.blocks[0][0]], [None]]): "as many columns as rows",
        lambda: Blocks([[None, None], [None, K.schur]]): "the size of field 0 is not known",
        lambda: solve(
            K, b, GMRES(preconditioner=BlockTriangular(PCG(1e-2), Jacobi()))
        ): "not a linear map",
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    if comm.size == 1:
        with pytest.raises(ValueError, match="field 1 has different sizes on this rank: 8 in row"):
            Blocks([[K.blocks[0][0], K.blocks[0][1]], [K.blocks[1][0], K.blocks[0][0]]])
