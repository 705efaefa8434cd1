"""mpigrad's Krylov methods. `solve` with them is tested in test_solve.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import grid_system

import mpigrad as mg
from helpers import close
from mpigrad.sparse import GMRES, PCG, BiCGStab, Jacobi, Matrix, Pattern, Result, solve
from mpigrad.sparse.solvers.jax_backend import run as run_krylov

J = Jacobi()
METHODS = [
    PCG(rtol=1e-12, preconditioner=J),
    PCG(rtol=1e-12, preconditioner=None),
    GMRES(rtol=1e-12, preconditioner=J),
    GMRES(rtol=1e-12, preconditioner=None, restart=9),
    BiCGStab(rtol=1e-12, preconditioner=J),
    BiCGStab(rtol=1e-12, preconditioner=None),
]


def crooked(system):
    """All ranks' values of a matrix that is not symmetric, and its dense form."""
    random = np.random.default_rng(8)
    factor = 1 + 0.4 * random.standard_normal(len(system.rows)) * (system.rows != system.columns)
    return system.all_values * factor


def dense(system, values):
    n = system.pattern.n_rows
    matrix = np.zeros((n, n), values.dtype)
    matrix[system.rows, system.columns] = values
    return matrix


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_methods_from_a_first_guess(comm):
    """From any guess. From a solution they take no step."""
    system = grid_system(comm, empty=1 if comm.size > 2 else None)
    kinds = (system.all_values, crooked(system))
    x0 = jnp.asarray(np.random.default_rng(1).standard_normal(30)[system.mine])

    @mg.jit
    def run(kinds, b, guesses):
        found = []
        for m in METHODS:
            k = 0 if m.symmetric else 1
            found.append(solve(Matrix(system.pattern, kinds[k]), b, m, guesses[k]))
        return found

    local = [jnp.asarray(v[system.entries]) for v in kinds]
    found = run(local, system.b, [x0, x0])
    for method, solution in zip(METHODS, found, strict=True):
        matrix = dense(system, kinds[0 if method.symmetric else 1])
        close(solution.value, np.linalg.solve(matrix, system.all_b)[system.mine], 1e-9)
        assert 4 < solution.stats["num_steps"] < 400
        # The true residual, not the recursion's.
        whole = np.concatenate(comm.mpi.allgather(np.asarray(solution.value)))
        norm = np.linalg.norm(system.all_b - matrix @ whole) / np.linalg.norm(system.all_b)
        assert norm < 1.1e-12
        close(solution.stats["relative_residual"], norm, 1e-14)

    exact = [
        jnp.asarray(np.linalg.solve(dense(system, v), system.all_b)[system.mine]) for v in kinds
    ]
    for size in (1, 0):
        for method, solution in zip(METHODS, run(local, size * system.b, exact), strict=True):
            assert solution.stats["num_steps"] == 0
            close(solution.value, size * exact[0 if method.symmetric else 1])


def test_complex_systems(comm):
    system = grid_system(comm)
    values = crooked(system) + 0.5j * np.random.default_rng(2).standard_normal(len(system.rows))
    b = system.all_b * (1 + 2j)
    methods = METHODS[3:5]

    @mg.jit
    def run(values, b):
        return [solve(Matrix(system.pattern, values), b, m).value for m in methods]

    expected = np.linalg.solve(dense(system, values), b)[system.mine]
    for got in run(jnp.asarray(values[system.entries]), jnp.asarray(b[system.mine])):
        close(got, expected, 1e-9)
    with pytest.raises(TypeError, match=r"PCG: it solves real systems, got complex128. Take GMRES"):
        solve(Matrix(system.pattern, system.values + 0j), system.b, METHODS[0])


def test_single_precision_ends_where_rounding_does(comm):
    system = grid_system(comm)
    values, b = system.values.astype("float32"), system.b.astype("float32")
    expected = np.linalg.solve(system.dense(system.all_values), system.all_b)[system.mine]

    @functools.partial(mg.jit, static_argnums=0)
    def run(rtol, values, b):
        A = Matrix(system.pattern, values)
        kinds = (PCG, GMRES, BiCGStab)
        return [solve(A, b, m(rtol=rtol, preconditioner=J), throw=False) for m in kinds]

    for solution in run(1e-5, values, b):
        assert solution.result == Result.SUCCESSFUL
        assert solution.value.dtype == np.float32
        close(solution.value, expected, 1e-4)
    for solution in run(1e-12, values, b):  # without end, if recursions were believed
        assert solution.result == Result.STAGNATED
        assert solution.stats["num_steps"] < 300
        close(solution.value, expected, 1e-4)


def ring(comm, n=3):
    """The pattern of a cyclic shift and the diagonal, 3 rows on each rank."""
    rows = comm.rank * n + np.arange(n)
    columns = np.concatenate([(rows + 1) % (n * comm.size), rows])
    return Pattern.from_coo(np.tile(rows, 2), columns, n, comm)


def test_shift_needs_a_whole_cycle(comm):
    """GMRES makes no progress on a cyclic shift before it has as many vectors as rows."""
    pattern = ring(comm)
    n = pattern.n_rows
    A = Matrix(pattern, jnp.repeat(jnp.array([1.0, 0.0]), 3))
    b = jnp.zeros(3).at[0].set(float(comm.rank == 0))
    found = solve(A, b, GMRES(preconditioner=None))
    assert found.stats["num_steps"] == n
    close(A @ found.value, b)
    early = solve(A, b, GMRES(preconditioner=None, restart=2), throw=False)
    assert (early.result, early.stats["relative_residual"]) == (Result.STAGNATED, 1)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"between restarts: .* is 1 after .*Raise restart=2"
    ):
        solve(A, b, GMRES(preconditioner=None, restart=2))


def test_a_basis_stays_orthogonal(comm):
    """One Gram-Schmidt step leaves a basis of this matrix dependent, and GMRES then diverges."""
    n = 20 * comm.size
    rows = 20 * comm.rank + np.arange(20)
    pattern = Pattern.from_coo(np.tile(rows, 2), np.concatenate([rows, (rows + 1) % n]), 20, comm)
    size = 10.0 ** (8 * rows / (n - 1))
    A = Matrix(pattern, jnp.concatenate([size, 0.5 * size * (rows < n - 1)]))
    found = solve(A, jnp.ones(20), GMRES(preconditioner=None, restart=n, rtol=1e-7))
    assert found.stats["num_steps"] <= n + 1


def test_breakdowns_end(comm):
    """A singular matrix, an indefinite one, one whose symmetric part is zero."""
    pattern = ring(comm)
    quiet = functools.partial(solve, throw=False)
    b = jnp.ones(3).at[1].set(2.0)
    last = comm.rank == comm.size - 1

    @mg.jit
    def run(singular, indefinite, b):
        P, G, S = (kind(preconditioner=None) for kind in (PCG, GMRES, BiCGStab))
        A, B = Matrix(pattern, singular), Matrix(pattern, indefinite)
        return [quiet(A, b, P), quiet(A, b, G), quiet(A, b, S), quiet(B, b, P)]

    diagonal = jnp.ones(3).at[1].set(0.0 if last else 1.0)  # no solution: a row of zeros
    turned = jnp.ones(3).at[1].set(-1.0 if last else 1.0)
    zeros = jnp.zeros(3)
    found = run(*(jnp.concatenate([zeros, d]) for d in (diagonal, turned)), b)
    expected = [
        (Result.NOT_POSITIVE_DEFINITE,),
        (Result.STAGNATED,),
        (Result.STAGNATED, Result.BREAKDOWN),
        (Result.NOT_POSITIVE_DEFINITE,),
    ]
    for solution, results in zip(found, expected, strict=True):
        assert int(solution.result) in results
        assert solution.stats["num_steps"] < 20

    # x -> (x2, -x1): shadow and residual stay orthogonal to what BiCGStab makes.
    rows = 2 * comm.rank + np.arange(2)
    skew = Matrix(Pattern.from_coo(rows, rows[::-1], 2, comm), jnp.array([1.0, -1.0]))
    stuck = quiet(skew, jnp.ones(2), BiCGStab(preconditioner=None))
    assert int(stuck.result) in (Result.STAGNATED, Result.BREAKDOWN)
    close(solve(skew, jnp.ones(2), GMRES(preconditioner=None)).value, jnp.array([-1.0, 1.0]))


@pytest.mark.parametrize(("kind", "reductions"), [(PCG, 1), (GMRES, 2), (BiCGStab, 2)])
def test_messages_of_an_iteration(comm, kind, reductions):
    system = grid_system(comm)
    method = kind(preconditioner=J)

    def run(values, b):
        return run_krylov(method, system.pattern, values, b, b, throw=False, site=0)

    def count(jaxpr):
        here = sum(e.primitive.name == "mpigrad_allreduce" for e in jaxpr.eqns)
        for e in jaxpr.eqns:
            if e.primitive.name == "cond":
                here += max(count(branch.jaxpr) for branch in e.params["branches"])
            elif "jaxpr" in e.params:
                here += count(getattr(e.params["jaxpr"], "jaxpr", e.params["jaxpr"]))
        return here

    jaxpr = jax.make_jaxpr(run)(system.values[None], system.b[None]).jaxpr
    (loop,) = [e for e in jaxpr.eqns if e.primitive.name == "while"]
    assert count(loop.params["body_jaxpr"].jaxpr) == reductions
