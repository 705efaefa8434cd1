import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import grid_system

import mpigrad as mg
from helpers import close
from mpigrad.sparse import (
    GMRES,
    PCG,
    BoomerAMG,
    BoxMG,
    Jacobi,
    Matrix,
    Pattern,
    Result,
    default_solver,
    hypre_available,
    solve,
)

OWN = PCG(max_steps=10_000, preconditioner=Jacobi())
SOLVERS = {"own": dataclasses.replace(OWN, rtol=1e-13)} | (
    {"PCG": PCG(rtol=1e-13)} if hypre_available() else {}
)
solvers = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
# Its adjoints send the matrix's values to their places in the transpose.
all_solvers = pytest.mark.parametrize(
    "solver",
    [*SOLVERS.values(), *([GMRES(rtol=1e-13)] if hypre_available() else [])],
    ids=[*SOLVERS, *(["GMRES"] if hypre_available() else [])],
)
LAST = "GMRES" if hypre_available() else "own"
impatient = pytest.mark.parametrize(
    "solver",
    [PCG(max_steps=2, preconditioner=p) for p in (Jacobi(), BoomerAMG())],
    ids=["own", "hypre"],
)
WEIGHTS = np.random.default_rng(11).standard_normal(30)


def share(system, solver):
    """A rank's part of sum(w x^2), as a function of values and right-hand side."""
    weights = jnp.asarray(WEIGHTS[system.mine])

    def f(values, b):
        return jnp.sum(weights * solve(Matrix(system.pattern, values), b, solver).value ** 2)

    return f


def whole(system):
    """The same without messages, a function of all ranks' values and right-hand sides."""
    return lambda values, b: jnp.sum(WEIGHTS * jnp.linalg.solve(system.dense(values), b) ** 2)


@pytest.mark.thin(3)
@pytest.mark.cases("1-*", reason="a rank has no rows, and other tests have rows on all ranks")
@solvers
@pytest.mark.parametrize("empty", [None, 1])
def test_solution_is_scipys(comm, solver, empty):
    import scipy.sparse
    import scipy.sparse.linalg

    system = grid_system(comm, (9, 7), empty=empty if comm.size > 1 else None)
    coo = (system.all_values, (system.rows, system.columns))
    expected = scipy.sparse.linalg.spsolve(scipy.sparse.csr_array(coo), system.all_b)
    solution = mg.jit(lambda A, b: solve(A, b, solver))(system.matrix, system.b)
    close(solution.value, expected[system.mine], 1e-10)
    assert solution.result == Result.SUCCESSFUL
    assert ", result=SUCCESSFUL (the solution is as accurate as" in repr(solution)
    assert 0 < solution.stats["relative_residual"] <= 1e-13
    assert 0 < solution.stats["num_steps"] < 100


@solvers
def test_derivatives_are_those_of_the_dense_solve(comm, solver):
    system = grid_system(comm)
    f, F = share(system, solver), whole(system)
    value, got = mg.jit(mg.value_and_grad(f, argnums=(0, 1)))(system.values, system.b)
    expected = jax.grad(F, argnums=(0, 1))(system.all_values, system.all_b)
    close(value, F(system.all_values, system.all_b), 1e-10)
    close(got, (expected[0][system.entries], expected[1][system.mine]), 1e-9)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.cases("own", reason="test_nonsymmetric.py and test_pfmg.py have dot tests with hypre")
@solvers
def test_dot(comm, solver):
    system = grid_system(comm, empty=0 if comm.size > 1 else None)

    def f(values, b):
        return solve(Matrix(system.pattern, values), b, solver).value

    assert mg.dot_test(f, system.values, system.b).error < 1e-10


def both(system, v, b):
    return (v[system.entries], b[system.mine])


@pytest.mark.cases(
    list(SOLVERS)[-1], reason="test_dense_rows.py has second derivatives of an own method"
)
@solvers
def test_hessian_times_vector(comm, solver):
    system = grid_system(comm)
    generator = np.random.default_rng(2)
    # Keep the matrix symmetric along the direction, for which the solver's adjoint is defined.
    half = generator.standard_normal((30, 30))
    dv = (half + half.T)[system.rows, system.columns]
    db = generator.standard_normal(30)
    primals, tangents = (system.values, system.b), both(system, dv, db)
    gradient = mg.grad(share(system, solver), argnums=(0, 1))
    got = mg.jit(lambda p, t: mg.jvp(gradient, p, t)[1])(primals, tangents)
    expected = jax.jvp(
        jax.grad(whole(system), argnums=(0, 1)), (system.all_values, system.all_b), (dv, db)
    )[1]
    close(got, both(system, *expected), 1e-8)


@pytest.mark.cases(f"values-{LAST}", "b-own", reason="only the adjoint of GMRES sends the values")
@all_solvers
@pytest.mark.parametrize("active", ["values", "b"])
def test_activity_may_differ_between_ranks(comm, solver, active):
    """The last rank differentiates the values or b, the others something else."""
    system = grid_system(comm)
    f, F = share(system, solver), whole(system)
    mine = comm.rank == comm.size - 1

    def divergent(theta):
        if not mine:
            return f(system.values, system.b) + 0 * jnp.sum(theta)
        return f(theta, system.b) if active == "values" else f(system.values, theta)

    theta = {"values": system.values, "b": system.b}[active]
    got = mg.grad(divergent)(theta)
    expected = jax.grad(F, argnums=0 if active == "values" else 1)(
        jnp.asarray(system.all_values), jnp.asarray(system.all_b)
    )
    part = expected[system.entries if active == "values" else system.mine]
    close(got, part if mine else 0 * part, 1e-9)


@pytest.mark.cases("own", LAST, reason="PCG by hypre runs the same primitive as GMRES")
@all_solvers
def test_in_loops_and_checkpoints(comm, solver):
    """Two implicit steps x <- (A + s)^-1 x inside a scan, rematerialised."""
    system = grid_system(comm)
    on_diagonal = (system.rows == system.columns).astype(float)

    def run(step, x, weights):
        step = jax.checkpoint(step)
        x, _ = jax.lax.scan(lambda x, s: (step(x, s), None), x, jnp.array([0.5, 1.0]))
        return jnp.sum(weights * x**3)

    def f(values, b):
        shift = jnp.asarray(on_diagonal[system.entries])

        def step(x, s):
            return solve(Matrix(system.pattern, values + s * shift), x, solver).value

        return run(step, b, WEIGHTS[system.mine])

    def F(values, b):
        def step(x, s):
            return jnp.linalg.solve(system.dense(values + s * on_diagonal), x)

        return run(step, b, WEIGHTS)

    got = mg.jit(mg.grad(f, argnums=(0, 1)))(system.values, system.b)
    expected = jax.grad(F, argnums=(0, 1))(system.all_values, system.all_b)
    close(got, both(system, *expected), 1e-9)


@pytest.mark.cases("own", reason="first guesses of hypre's solves have columns, too")
@solvers
def test_several_right_hand_sides(comm, solver):
    system = grid_system(comm)
    B = np.random.default_rng(1).standard_normal((30, 3))
    expected = np.linalg.solve(system.dense(system.all_values), B)[system.mine]
    mine = jnp.asarray(B[system.mine])
    together = solve(system.matrix, mine, solver)
    close(together.value, expected, 1e-10)
    assert together.result.shape == together.stats["num_steps"].shape == (3,)
    batched = mg.vmap(lambda b: solve(system.matrix, b, solver).value, in_axes=1, out_axes=1)
    close(mg.jit(batched)(mine), expected, 1e-10)


@pytest.mark.cases("own", reason="test_nonsymmetric.py has batches by hypre")
@solvers
def test_batches_of_matrices_and_of_derivatives(comm, solver):
    system = grid_system(comm)
    factors = jnp.array([1.0, 2.0, 4.0])
    f = share(system, solver)
    got = mg.vmap(lambda s: mg.grad(f)(s * system.values, system.b))(factors)
    expected = [jax.grad(whole(system))(s * system.all_values, system.all_b) for s in factors]
    close(got, jnp.stack([e[system.entries] for e in expected]), 1e-9)


@solvers
def test_more_ranks_than_rows(comm, solver):
    n_local = int(comm.rank == comm.size - 1)
    own = [0] * n_local
    A = Matrix(Pattern.from_coo(own, own, n_local, comm), jnp.full(n_local, 4.0))
    close(solve(A, jnp.full(n_local, 2.0), solver).value, jnp.full(n_local, 0.5))


@solvers
def test_zero_right_hand_side(comm, solver):
    system = grid_system(comm)
    solution = solve(system.matrix, 0 * system.b, solver)
    close(solution.value, jnp.zeros(system.pattern.n_local))
    assert solution.stats["num_steps"] == solution.stats["relative_residual"] == 0


FAULTS = {
    "NaN in the matrix": (
        lambda v, b: (v.at[0].set(jnp.nan), b),
        Result.NOT_FINITE,
        "holds such a value",
    ),
    "infinite b": (lambda v, b: (v, b.at[0].set(jnp.inf)), Result.NOT_FINITE, "holds such a value"),
    "wrong sign": (lambda v, b: (-v, b), Result.NOT_POSITIVE_DEFINITE, "solve with -A and -b"),
    "not symmetric": (
        lambda v, b: (v.at[jnp.argmin(v)].multiply(1.5), b),
        Result.NOT_SYMMETRIC,
        r"entries \(i, j\) and \(j, i\)",
    ),
}


@functools.cache
def programs(comm, solver):
    """A system, and its solve with and without errors. They are compiled once for all faults."""
    system = grid_system(comm)
    run = lambda values, b, throw: solve(Matrix(system.pattern, values), b, solver, throw=throw)
    loud, quiet = (mg.jit(functools.partial(run, throw=throw)) for throw in (True, False))
    return system, loud, quiet


@solvers
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_an_error_on_all(comm, solver, fault):
    system, call, look = programs(comm, solver)
    spoil, result, message = FAULTS[fault]
    values, b = system.values, system.b
    if comm.rank == comm.size - 1:
        values, b = spoil(values, b)

    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{result.message}.*{message}"):
        call(values, b)
    quiet = look(values, b)
    assert quiet.result == result
    assert np.isnan(quiet.value).all()
    # All ranks have left the failed solve together, and go on together.
    assert call(system.values, system.b).result == Result.SUCCESSFUL
    # What was found good once is looked at again when its values are new.
    assert look(values, b).result == result


@impatient
def test_no_convergence(comm, solver):
    if not isinstance(solver.preconditioner, Jacobi) and not hypre_available():
        pytest.skip("no hypre")
    system = grid_system(comm, (20, 20))
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"test_solve.py:\d+.*did not converge: max_steps steps were .* residual is .* after "
        r"2 steps, above the tolerance 1e-08\. Raise max_steps=2",
    ):
        solve(system.matrix, system.b, solver)
    quiet = solve(system.matrix, system.b, solver, throw=False)
    assert quiet.result == Result.MAX_STEPS_REACHED
    assert quiet.stats["num_steps"] == 2
    residual = system.matrix @ quiet.value - system.b
    norm = np.sqrt(mg.allreduce(jnp.sum(residual**2)) / np.sum(system.all_b**2))
    close(quiet.stats["relative_residual"], norm, 1e-9)


@impatient
def test_no_convergence_of_the_adjoint(comm, solver):
    """Its error tells that it is the adjoint's, and of which line."""
    if not isinstance(solver.preconditioner, Jacobi) and not hypre_available():
        pytest.skip("no hypre")
    system = grid_system(comm, (20, 20))

    def f(b):
        return jnp.vdot(system.b, solve(system.matrix, b, solver).value)

    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"the adjoint of .*test_solve.py:\d+.*did not converge"
    ):
        mg.grad(f)(0 * system.b)  # zero is its own solution, the adjoint takes more steps


def test_errors_name_what_is_wrong(comm):
    system = grid_system(comm)
    n = system.pattern.n_local
    with pytest.raises(ValueError, match=rf"b has shape \({n + 1},\) on rank {comm.rank}"):
        solve(system.matrix, jnp.zeros(n + 1))
    with pytest.raises(TypeError, match=r"A must be a mpigrad\.sparse\.Matrix, a linear"):
        solve(system.values, system.b)
    with pytest.raises(TypeError, match=r"Write PCG\(preconditioner=BoomerAMG"):
        solve(system.matrix, system.b, BoomerAMG())
    with pytest.raises(TypeError, match=r"the solver must be PCG.*got 'cg'"):
        solve(system.matrix, system.b, "cg")
    bare = Pattern.from_coo([2 * comm.rank], [2 * comm.rank], 2, comm)
    with pytest.raises(ValueError, match="the pattern has none in row 1"):
        solve(Matrix(bare, jnp.ones(1)), jnp.ones(2))


def test_default_solver():
    own = dataclasses.replace(OWN, rtol=1e-5)
    expected = PCG(rtol=1e-5, preconditioner=BoomerAMG()) if hypre_available() else own
    assert default_solver(rtol=1e-5) == expected
    assert default_solver(rtol=1e-5, dtype="float32") == own
    assert type(default_solver(symmetric=False)) is GMRES
    assert default_solver(dtype=float) == default_solver(dtype="float64") == default_solver()


@dataclasses.dataclass(frozen=True)
class Mine(PCG):
    """A method with an `__init__` and iterations of its own."""

    def __init__(self, tolerance):
        super().__init__(rtol=tolerance)

    def iterate(self, system):
        return super().iterate(system)


@pytest.mark.ranks(1)
def test_what_auto_means_in_a_subclass():
    assert Mine(1e-6).for_matrix.preconditioner == Jacobi()
    assert Mine(1e-6).for_function.preconditioner is None
    pattern = Pattern.from_coo([0, 1], [0, 1], 2)
    x = solve(Matrix(pattern, jnp.array([2.0, 4.0])), jnp.ones(2), Mine(1e-9)).value
    close(x, jnp.array([0.5, 0.25]))


@pytest.mark.parametrize("kind", [PCG])
def test_settings_are_checked(kind):
    with pytest.raises(ValueError, match="rtol must lie between 0 and 1, got rtol=0"):
        kind(rtol=0)
    with pytest.raises(ValueError, match=r"max_steps must be positive .* got max_steps=0"):
        kind(max_steps=0)
    with pytest.raises(TypeError, match="the preconditioner must be"):
        kind(preconditioner="ilu")


@pytest.mark.parametrize("preconditioner", [BoomerAMG(), Jacobi()], ids=["hypre", "own"])
def test_a_huge_diagonal_hides_no_asymmetry(comm, preconditioner):
    """A Dirichlet condition by a large number in the rows alone: its links go one way."""
    if not isinstance(preconditioner, Jacobi) and not hypre_available():
        pytest.skip("no hypre")
    first, n = 4 * comm.rank, 4
    i = first + np.arange(n)
    near = np.stack([i, i - 1, i + 1], 1)
    inside = (near >= 0) & (near < n * comm.size)
    values = np.where(i[:, None] == 0, [1e10, 0, 0], [2.0, -1, -1])
    pattern = Pattern.from_coo(np.repeat(i, 3)[inside.ravel()], near[inside], n, comm)
    A = Matrix(pattern, jnp.asarray(values[inside]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="is not symmetric"):
        solve(A, jnp.ones(n), PCG(preconditioner=preconditioner)).value.block_until_ready()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("preconditioner", [BoomerAMG(), BoxMG()], ids=["hypre", "boxmg"])
def test_ranks_that_ask_for_different_solves(comm, preconditioner):
    if preconditioner.backend == "hypre" and not hypre_available():
        pytest.skip("no hypre")
    grid, name = mg.Grid((8, 6), (1.0, 1.0), comm), re.escape(repr(preconditioner))
    pattern = Pattern.from_stencil(grid, [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)])
    matrix = Matrix.assemble(pattern, [jnp.full(grid.local_shape, v) for v in (5.0, *[-1.0] * 4)])
    method, b = PCG(preconditioner=preconditioner), jnp.ones(grid.n_local)
    for solver, sides, texts in (
        (
            dataclasses.replace(method, rtol=1e-4 if comm.rank else 1e-8),
            b,
            (f"1 right-hand side by PCG.preconditioner={name}, rtol=1e-08,", "rtol=0.0001,"),
        ),
        (
            method,
            jnp.stack([b] * (1 + comm.rank), 1),
            ("1 right-hand side by", "2 right-hand sides by"),
        ),
    ):
        expected = f"ask for different solves: rank 0 for .*{texts[0]}.*, rank 1 for .*{texts[1]}"
        with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
            solve(matrix, sides, solver).value.block_until_ready()


@pytest.mark.ranks(2)
@pytest.mark.skipif(not hypre_available(), reason="no hypre")
def test_values_of_a_refused_solve_are_taken_by_the_next(comm):
    system = grid_system(comm)
    x = solve(system.matrix, system.b, PCG(rtol=1e-12)).value
    twice = Matrix(system.pattern, 2 * system.values)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ask for different solves"):
        solve(twice, system.b, PCG(rtol=1e-4 if comm.rank else 1e-12)).value.block_until_ready()
    close(2 * solve(twice, system.b, PCG(rtol=1e-12)).value, x, 1e-8)
