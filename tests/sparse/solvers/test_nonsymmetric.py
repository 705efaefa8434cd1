"""Solves of any matrix by hypre: GMRES, BiCGStab, multigrid alone, and their adjoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import System, grid_system
from whole import Entries, Striped, prove, rows_of

import mpigrad as mg
from helpers import close
from mpigrad.sparse import (
    GMRES,
    PCG,
    BiCGStab,
    BoomerAMG,
    Jacobi,
    Matrix,
    Multigrid,
    Pattern,
    Result,
    hypre_available,
    solve,
    solver_seconds,
)
from mpigrad.sparse.matrix.products import transpose_values, transposed

pytestmark = pytest.mark.skipif(not hypre_available(), reason="no hypre")

METHODS = {
    "GMRES": GMRES(rtol=1e-13),
    "BiCGStab": BiCGStab(rtol=1e-13),
    "Multigrid": Multigrid(rtol=1e-13),
    "GMRES forward": GMRES(
        rtol=1e-13, restart=5, preconditioner=BoomerAMG(relaxation="forward-gauss-seidel")
    ),
}
methods = pytest.mark.parametrize("solver", METHODS.values(), ids=METHODS.keys())
GENERATOR = np.random.default_rng(11)
WEIGHTS, DB = GENERATOR.standard_normal((2, 30))


def skewed(comm, shape=(6, 5), empty=None) -> System:
    """`grid_system` with every link weaker in one direction: no symmetry."""
    system = grid_system(comm, shape, empty)
    factors = np.random.default_rng(0).uniform(0.3, 1, len(system.rows))
    values = np.where(system.rows != system.columns, factors, 1) * system.all_values
    return dataclasses.replace(system, all_values=values)


def transpose(matrix):
    pattern = matrix.pattern
    return Matrix(transposed(pattern), transpose_values(pattern, matrix.values))


def residual(matrix, x, b):
    """|b - A x| / |b| of all ranks."""
    squares = jnp.stack([jnp.sum((b - matrix @ x) ** 2), jnp.sum(b**2)])
    above, below = mg.allreduce(squares)
    return np.sqrt(above / below)


def derivatives(f, loss, kit):
    """Value and tangent of f, gradient of the loss, and its derivative along the direction."""

    def all_of_them(p, t):
        gradient = kit.grad(lambda p: loss(f(*p)))
        return *kit.jvp(lambda p: f(*p), (p,), (t,)), *kit.jvp(gradient, (p,), (t,))

    return all_of_them


@pytest.mark.cases(
    "GMRES", "Multigrid", reason="test_taylor has BiCGStab, and all are hypre's with one adjoint"
)
@methods
def test_all_derivatives_are_those_of_the_dense_solve(comm, solver):
    """To second order, along changes of the matrix that are not symmetric."""
    if solver is not METHODS["GMRES"] and comm.size in (1, 4):
        pytest.skip("two numbers of ranks are enough")
    system = skewed(comm, empty=comm.size - 1 if comm.size > 2 else None)
    dv = np.random.default_rng(5).standard_normal(len(system.rows))
    mine = lambda v, b: (v[system.entries], b[system.mine])

    def x_of(values, b):
        return solve(Matrix(system.pattern, values), b, solver).value

    def X_of(values, b):
        return jnp.linalg.solve(system.dense(values), b)

    weights = jnp.asarray(WEIGHTS[system.mine])
    got = mg.jit(derivatives(x_of, lambda x: jnp.sum(weights * x**3), mg))(
        (system.values, system.b), mine(dv, DB)
    )
    expected = jax.jit(derivatives(X_of, lambda x: jnp.sum(WEIGHTS * x**3), jax))(
        (system.all_values, system.all_b), (dv, DB)
    )
    for part, whole in zip(got[:2], expected[:2], strict=True):
        close(part, whole[system.mine], 1e-10)
    for part, whole in zip(got[2:], expected[2:], strict=True):
        close(part, mine(*whole), 1e-8)


@pytest.mark.ranks(1, 2, 3, 4)
def test_dot_and_transposed_solves(comm):
    """The product of both derivatives, through a solve with A and one with its transpose."""
    system = skewed(comm)

    def f(values, b):
        A = Matrix(system.pattern, values)
        return solve(transpose(A), solve(A, b, METHODS["GMRES"]).value, METHODS["GMRES"]).value

    before = solver_seconds()
    assert mg.dot_test(f, system.values, system.b).error < 1e-10
    after = solver_seconds()
    # Two hierarchies serve two solves, their tangents and their adjoints.
    assert after["setups"] - before["setups"] == 2
    D = system.dense(system.all_values)
    expected = np.linalg.solve(D.T, np.linalg.solve(D, system.all_b))
    close(f(system.values, system.b), expected[system.mine], 1e-10)


def test_taylor(comm):
    system = skewed(comm)
    weights = jnp.asarray(WEIGHTS[system.mine])

    def loss(p):
        A = Matrix(system.pattern, p[0])
        x = solve(A, p[1], METHODS["BiCGStab"]).value
        return jnp.sum(weights * jnp.sin(x + solve(transpose(A), x, METHODS["GMRES"]).value))

    rates = mg.taylor_test(loss, (system.values, system.b), step=1e-3, halvings=2).rates_with
    assert min(rates) > 1.9


def test_batches(comm):
    """A matrix of each right-hand side's own, and gradients of them."""
    system = skewed(comm)
    factors = jnp.array([1.0, 2.0, 4.0])

    def f(s, b):
        return jnp.sum(solve(Matrix(system.pattern, s * system.values), b, GMRES()).value ** 2)

    got = mg.jit(mg.vmap(mg.grad(f, argnums=1), in_axes=(0, None)))(factors, system.b)
    D = system.dense(system.all_values)
    one = 2 * np.linalg.solve(D.T, np.linalg.solve(D, system.all_b))[system.mine]
    close(got, one / factors[:, None] ** 2, 1e-6)


@pytest.mark.cases("PCG", "GMRES", "Multigrid", reason="BiCGStab and GMRES run the same code")
@pytest.mark.parametrize("kind", [PCG, GMRES, BiCGStab, Multigrid])
def test_first_guess(comm, kind):
    """Any guess leads to the solution, a good one sooner, without a derivative."""
    solver, system = kind(rtol=1e-9), grid_system(comm, (20, 20))
    A, b = system.matrix, system.b

    @mg.jit
    def call(b, *guess):
        solution = solve(A, b, solver, *guess)
        return solution.value, solution.stats["num_steps"], solution.stats["relative_residual"]

    exact, steps, _ = call(b)
    zeros = call(b, 0 * b)
    assert (zeros[0] == exact).all()
    assert zeros[1] == steps
    near = call(b, exact + 1e-6 * b)
    assert 0 < near[1] < steps
    found = call(b, exact)
    assert found[1] == 0
    assert found[2] <= 1e-9
    assert (found[0] == exact).all()
    far = call(b, 1e3 * b)
    assert far[1] >= steps
    for x in (near[0], far[0]):
        assert residual(A, x, b) < 2e-9
    gradient = mg.grad(lambda x0: jnp.sum(solve(A, b, solver, x0).value))(b)
    assert not gradient.any()
    assert call(0 * b, b)[1] == 0  # nothing to solve
    several = solve(A, jnp.stack([b, b], 1), solver, jnp.stack([0 * b, exact], 1))
    assert several.stats["num_steps"].tolist() == [steps, 0]


def scaled(system, amount):
    """Values of a symmetric system with links changed by up to this fraction on all ranks."""
    n = system.pattern.n_rows
    change = 1 + amount * np.sin(np.add.outer(np.arange(n), np.arange(n)))
    links = np.where(system.rows != system.columns, system.all_values, 0)
    links = links * change[system.rows, system.columns]
    diagonal = 0.3 - np.bincount(system.rows, links, n)
    return jnp.asarray(
        np.where(system.rows == system.columns, diagonal[system.rows], links)[system.entries]
    )


@pytest.mark.cases("PCG", reason="all methods share the code that keeps hierarchies")
@pytest.mark.parametrize("kind", ["PCG", "GMRES", "Multigrid"])
def test_stale_hierarchies(comm, kind):
    """A hierarchy is kept for near values and renewed for others. All solutions are right."""
    amg = BoomerAMG(reuse="stale")
    solver = (
        Multigrid(cycle=amg)
        if kind == "Multigrid"
        else {"PCG": PCG, "GMRES": GMRES}[kind](preconditioner=amg)
    )
    system = grid_system(comm, (20, 20))

    @mg.jit
    def call(values):
        solution = solve(Matrix(system.pattern, values), system.b, solver)
        return solution.value, solution.stats["num_steps"], solution.stats["setups"]

    def solved(amount):
        values = scaled(system, amount)
        x, steps, setups = call(values)
        assert residual(Matrix(system.pattern, values), x, system.b) < 2e-8
        return int(steps), int(setups)

    steps, setups = solved(0.0)
    assert setups == 1
    for amount in (0.01, 0.02, 0.05, 0.1):
        more, setups = solved(amount)
        assert setups == 1
        assert more <= 2 * steps + 5
    far = jnp.where(jnp.asarray(system.rows == system.columns)[system.entries], 1e3, 1.0)
    x, steps, setups = call(far * system.values)
    assert setups == 2
    assert residual(Matrix(system.pattern, far * system.values), x, system.b) < 2e-8
    _, again = solved(0.0)
    assert again == 3
    # The adjoint is of the new values, too, whatever the hierarchy was made of.
    values = scaled(system, 0.05)
    loss = lambda b: jnp.sum(solve(Matrix(system.pattern, values), b, solver).value)
    adjoint = mg.jit(mg.grad(loss))(system.b)
    ones = jnp.ones(system.pattern.n_local)
    assert residual(Matrix(system.pattern, values), adjoint, ones) < 2e-8


def singular(system):
    """Rows that sum to zero: constants are lost, and `b` is out of reach."""
    return jnp.asarray(system.all_values - np.where(system.rows == system.columns, 0.3, 0))[
        system.entries
    ]


def spoilt(system, where, value):
    values = system.all_values.copy()
    values[where] = value
    return jnp.asarray(values[system.entries])


FAULTS = {
    "singular": lambda s: (singular(s), s.b + 1, None, "matrix may be singular|did not converge"),
    "zero diagonal": lambda s: (
        spoilt(s, np.flatnonzero(s.rows == s.columns)[-1], 0.0), s.b, None,
        rf"by a zero on the diagonal: .* on rank {s.pattern.comm.size - 1}",
    ),
    "NaN": lambda s: (spoilt(s, -1, np.nan), s.b, None, "holds such a value on rank"),
    "NaN in x0": lambda s: (s.values, s.b, s.b * np.nan, "holds such a value on rank"),
    "no convergence": lambda s: (
        s.values, s.b, None, r"test_nonsymmetric.py:\d+.*did not converge: .* Raise .*max_steps=2",
    ),
}  # fmt: skip


@pytest.mark.cases(
    *("GMRES-*", "Multigrid-singular", "Multigrid-no convergence"),
    reason="one check is for all methods, and BiCGStab and GMRES run the same code",
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", [GMRES, BiCGStab, Multigrid])
def test_faults_are_errors_on_all_ranks(comm, kind, fault):
    system = grid_system(comm, (12, 11))
    values, b, x0, message = FAULTS[fault](system)
    steps = 2 if fault == "no convergence" else 100
    A = Matrix(system.pattern, values)
    solver = kind(rtol=1e-12, max_steps=steps)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        solve(A, b, solver, x0)
    solution = solve(A, b, solver, x0, throw=False)
    assert solution.result not in (Result.SUCCESSFUL, Result.NOT_SYMMETRIC)
    if fault == "no convergence":
        assert solution.result == Result.MAX_STEPS_REACHED
        assert solution.stats["num_steps"] == steps
        close(solution.stats["relative_residual"], residual(A, solution.value, b), 1e-6)
    # All ranks have left the failed solve together, and go on together.
    assert solve(system.matrix, system.b, GMRES()).result == Result.SUCCESSFUL


@pytest.mark.cases("(12, 11)", "(9, 9)", reason="the other sizes have other rounding errors only")
@pytest.mark.parametrize("shape", [(12, 11), (9, 9), (10, 10), (16, 5), (20, 20), (7, 13)], ids=str)
def test_conjugate_gradients_do_not_promise_what_a_singular_matrix_cannot_keep(comm, shape):
    """The recurrence of the residual falls below the tolerance, but the residual itself does not.

    Nor is the matrix called indefinite where p is almost constant: <p, A p> is rounding there.
    """
    system = grid_system(comm, shape)
    A = Matrix(system.pattern, singular(system))
    for size in (1, 1e-3, 1e3):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"may be singular|did not converge"):
            solve(A, size * system.b + 1, PCG())


def test_tolerance_below_rounding(comm):
    system = skewed(comm)
    solution = solve(system.matrix, system.b, GMRES(rtol=1e-18), throw=False)
    assert solution.result in (Result.STAGNATED, Result.MAX_STEPS_REACHED)
    assert residual(system.matrix, solution.value, system.b) < 1e-13


def test_an_unsymmetric_matrix_is_for_others_than_pcg(comm):
    """Also if GMRES has made the hierarchy that both use."""
    system = skewed(comm)
    for solver in (PCG(), GMRES(), PCG()):
        solution = solve(system.matrix, system.b, solver, throw=False)
        right = Result.SUCCESSFUL if solver == GMRES() else Result.NOT_SYMMETRIC
        assert solution.result == right
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"or solve with GMRES\(\) or BiCGStab"):
        solve(system.matrix, system.b, PCG())
    with pytest.raises(ValueError, match="PCG: the preconditioner must be symmetric"):
        PCG(preconditioner=BoomerAMG(relaxation="forward-gauss-seidel"))


def test_errors_name_what_is_wrong(comm):
    system = skewed(comm)
    n = system.pattern.n_local
    with pytest.raises(ValueError, match=rf"x0 must have .* got \({n + 1},\) on rank {comm.rank}"):
        solve(system.matrix, system.b, GMRES(), jnp.zeros(n + 1))
    with pytest.raises(ValueError, match=r"30 rows are not a multiple of unknowns_per_cell=4"):
        solve(system.matrix, system.b, GMRES(preconditioner=BoomerAMG(unknowns_per_cell=4)))
    wide = Pattern.from_coo([comm.rank], [comm.rank], 1, comm, n_local_columns=2)
    with pytest.raises(ValueError, match="the matrix must be square"):
        solve(Matrix(wide, jnp.ones(1)), jnp.ones(1), GMRES())
    with pytest.raises(ValueError, match=r"GMRES: restart must be positive .* got restart=0"):
        GMRES(restart=0)
    with pytest.raises(TypeError, match=r"the cycle must be BoomerAMG"):
        Multigrid(cycle=Jacobi())


def test_a_system_of_two_equations(comm):
    """Two unknowns in each cell, coupled, one on a scale of its own."""
    system = grid_system(comm, (16, 12), empty=0 if comm.size > 2 else None)
    scale = np.array([1.0, 1e4])
    i, j, v = (system.rows[system.entries], system.columns[system.entries], system.values)
    rows = np.concatenate([2 * i, 2 * i + 1, 2 * i[i == j], 2 * i[i == j] + 1])
    columns = np.concatenate([2 * j, 2 * j + 1, 2 * i[i == j] + 1, 2 * i[i == j]])
    coupling = np.full(2 * np.sum(i == j), 0.1)
    values = jnp.concatenate([scale[0] * v, scale[1] * v, coupling])
    A = Matrix(Pattern.from_coo(rows, columns, 2 * system.pattern.n_local, comm), values)
    b = jnp.stack([system.b, scale[1] * system.b], 1).ravel()
    for kind in (PCG, GMRES):
        solution = solve(A, b, kind(preconditioner=BoomerAMG(unknowns_per_cell=2)))
        assert solution.stats["num_steps"] <= 12
        assert residual(A, solution.value, b) <= 1.1e-8


@pytest.mark.full("products, transposes and solves have such tests one by one")
@pytest.mark.ranks(1, 2, 3, 4)
def test_adcme_five_by_five(comm):
    """x = (A Aᵀ)⁻¹ b by GMRES, with first and second derivatives in the entries of A and in b."""
    edges = np.linspace(0, 5, comm.size + 1).astype(int)
    n_local = int(edges[comm.rank + 1] - edges[comm.rank])
    pattern = Pattern.from_csr(
        5 * np.arange(n_local + 1), np.tile(np.arange(5), n_local), comm=comm
    )
    entries = Entries.of(pattern)
    b = rows_of(pattern)

    def local(values, b):
        A = Matrix(pattern, values)
        return solve(A @ A.T, b, GMRES(rtol=1e-13)).value

    def whole(values, b):
        A = entries.dense(values)
        return jnp.linalg.solve(A @ A.T, b)

    values = entries.values(1).whole + 4 * (entries.rows == entries.columns)
    prove(local, whole, (Striped(values, entries.mine), b), b.mine, rtol=1e-8)


def poisson_error(comm, n):
    """Largest error of cell-centred -Δu = f, u = x(1 - x)y(1 - y), on n cells a rank and side."""
    side = n * comm.size
    h, first = 1 / side, n * comm.rank
    i, j = (a.ravel() for a in np.meshgrid(np.arange(n) + first, np.arange(side), indexing="ij"))
    rows, columns, values = [], [], []
    diagonal = np.zeros(i.shape)
    for di, dj in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        inside = (i + di >= 0) & (i + di < side) & (j + dj >= 0) & (j + dj < side)
        diagonal += np.where(inside, 1, 2) / h**2  # the wall is half a cell away
        rows.append((i * side + j)[inside])
        columns.append(((i + di) * side + j + dj)[inside])
        values.append(np.full(inside.sum(), -1 / h**2))
    rows, columns = (np.concatenate([*k, i * side + j]) for k in (rows, columns))
    pattern = Pattern.from_coo(rows, columns, n * side, comm)
    x, y = (i + 0.5) * h, (j + 0.5) * h
    f = 2 * (x * (1 - x) + y * (1 - y))
    A = Matrix(pattern, jnp.asarray(np.concatenate([*values, diagonal])))
    errors = []
    for kind in (PCG, GMRES):
        u = solve(A, jnp.asarray(f), kind(rtol=1e-10)).value
        errors.append(np.abs(u - x * (1 - x) * y * (1 - y)).max())
    return comm.mpi.allreduce(np.array(errors))


@pytest.mark.full("it measures the accuracy of a discretization, on up to 200 x 200 cells")
def test_second_order_convergence_to_the_exact_solution(comm):
    """ADCME's case: 50 cells a rank and side, and coarser ones."""
    coarse, middle, fine = (poisson_error(comm, n) for n in (12, 25, 50))
    assert (np.log(coarse / middle) / np.log(25 / 12) > 1.9).all()
    assert (np.log(middle / fine) / np.log(2) > 1.9).all()
    assert (fine < 1e-3).all()
