"""Solvers and preconditioners of a user: used by `solve` and `newton`, differentiated, judged."""

import dataclasses

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
    PFMG,
    BiCGStab,
    BoomerAMG,
    Jacobi,
    LinearSolver,
    Matrix,
    Multigrid,
    Pattern,
    Preconditioner,
    Result,
    hypre_available,
    newton,
    solve,
)

TOLERANCE = 1e-12


@dataclasses.dataclass(frozen=True)
class Settings:
    rtol: float = TOLERANCE
    max_steps: int = 4000
    preconditioner: Preconditioner | None = Jacobi()  # noqa: RUF009 (frozen)


@dataclasses.dataclass(frozen=True)
class Richardson(Settings, LinearSolver):
    """x <- x + damping M (b - A x)."""

    damping: float = 0.8

    def iterate(self, system):
        goal = self.rtol**2 * system.dots((system.b, system.b))[0]

        def running(state):
            _, _, rr, steps = state
            return (rr > goal) & (steps < self.max_steps)

        def step(state):
            x, r, _, steps = state
            x = x + self.damping * system.precondition(r)
            r = system.b - system.product(x)
            return x, r, system.dots((r, r))[0], steps + 1

        r = system.b - system.product(system.x0)
        start = system.x0, r, system.dots((r, r))[0], 0
        x, _, _, steps = jax.lax.while_loop(running, step, start)
        return x, steps


@dataclasses.dataclass(frozen=True)
class ConjugateResidual(Settings, LinearSolver):
    """A Krylov method for symmetric matrices, definite or not."""

    symmetric = True
    preconditioner: Preconditioner | None = None

    def iterate(self, system):
        r = system.b - system.product(system.x0)
        ar = system.product(r)
        bb, rr, rar = system.dots((system.b, system.b), (r, r), (r, ar))

        def step(state):
            x, r, _, p, ar, ap, rar, steps = state
            (apap,) = system.dots((ap, ap))
            x, r = x + rar / apap * p, r - rar / apap * ap
            ar = system.product(r)
            rr, new = system.dots((r, r), (r, ar))
            return x, r, rr, r + new / rar * p, ar, ar + new / rar * ap, new, steps + 1

        start = system.x0, r, rr, r, ar, ar, rar, 0
        end = jax.lax.while_loop(
            lambda s: (s[2] > 0.25 * self.rtol**2 * bb) & (s[-1] < self.max_steps), step, start
        )
        return end[0], end[-1]


@dataclasses.dataclass(frozen=True)
class MyPCG(PCG):
    """The same method under another name."""


@dataclasses.dataclass(frozen=True)
class TwoJacobiSweeps(Preconditioner):
    """Two damped sweeps of Jacobi's method: symmetric, with a product and its messages inside."""

    damping: float = 0.7

    def inverse(self, A):
        diagonal = A.diagonal()

        def apply(r):
            z = self.damping * r / diagonal
            return z + self.damping * (r - A @ z) / diagonal

        return apply


@dataclasses.dataclass(frozen=True)
class Returns(Settings, LinearSolver):
    """Returns a wrong result."""

    what: str = "zero"
    preconditioner: Preconditioner | None = None

    def iterate(self, system):
        b = system.b
        return {
            "zero": (0 * b, 3),
            "NaN": (jnp.nan * b, 1),
            "too many steps": (0 * b, self.max_steps),
            "no pair": b,
            "one entry": (b[:1], 1),
            "float steps": (b, 1.0),
        }[self.what]


@dataclasses.dataclass(frozen=True)
class Inverse(Preconditioner):
    """A wrong preconditioner."""

    what: str = "zero"

    def inverse(self, A):
        return {
            "zero": lambda r: 0 * r,
            "negative": lambda r: -r,
            "one entry": lambda r: r[:1],
            "single precision": lambda r: r.astype("float32"),
            "no function": None,
        }[self.what]


def skewed(system):
    factor = np.where(system.rows < system.columns, 0.8, 1.0)
    return system.all_values * factor


CASES = {
    "Richardson": (Richardson(), False),
    "Richardson without symmetry": (Richardson(preconditioner=TwoJacobiSweeps()), True),
    "Krylov": (ConjugateResidual(), False),
    "subclass": (MyPCG(rtol=TOLERANCE, preconditioner=Jacobi()), False),
    "PCG, own inverse": (PCG(rtol=TOLERANCE, preconditioner=TwoJacobiSweeps()), False),
    "GMRES, own inverse": (GMRES(rtol=TOLERANCE, preconditioner=TwoJacobiSweeps()), True),
    "BiCGStab, own inverse": (BiCGStab(rtol=TOLERANCE, preconditioner=TwoJacobiSweeps()), True),
}


@pytest.mark.cases(
    "Richardson without symmetry", "Krylov",
    reason="own methods without and with symmetry; PCG and GMRES with an own inverse are below",
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(comm, name):
    """The solution, the gradient of a function of it, and a dot test in values and b."""
    solver, skew = CASES[name]
    system = grid_system(comm)
    all_values = skewed(system) if skew else system.all_values
    values, weights = jnp.asarray(all_values[system.entries]), jnp.cos(jnp.arange(30.0))

    @mg.jit
    @mg.value_and_grad
    def f(values, b):
        x = solve(Matrix(system.pattern, values), b, solver).value
        return jnp.sum(weights[system.mine] * x**3)

    def whole(values):
        return jnp.sum(weights * jnp.linalg.solve(system.dense(values), system.all_b) ** 3)

    expected = jax.jit(jax.value_and_grad(whole))(jnp.asarray(all_values))
    value, gradient = f(values, system.b)
    close(value, expected[0], 1e-8)
    close(gradient, expected[1][system.entries], 1e-7)

    def solution(b):
        return solve(Matrix(system.pattern, values), b, solver).value

    assert mg.dot_test(solution, system.b, rtol=1e-9).error < 1e-9


def test_own_preconditioners_save_steps(comm):
    system = grid_system(comm, (12, 11))
    for kind in (PCG, GMRES):
        steps = [
            solve(system.matrix, system.b, kind(preconditioner=p)).stats["num_steps"]
            for p in (None, TwoJacobiSweeps())
        ]
        assert steps[1] < steps[0]


def test_functions_batches_and_newton(comm):
    """Own solvers take a function in place of a matrix, several columns, and Newton's systems."""
    system = grid_system(comm)
    solver = Richardson(preconditioner=None, damping=0.08)
    x = mg.jit(lambda b: solve(lambda v: system.matrix @ v, b, solver).value)(system.b)
    close(system.matrix @ x, system.b, 1e-10)
    both = jnp.stack([system.b, -2 * system.b], axis=1)
    close(solve(system.matrix, both, Richardson()).value, jnp.stack([x, -2 * x], axis=1), 1e-9)
    found = newton(lambda u: system.matrix @ u + 0.1 * u**3 - system.b, 0 * x, solver)
    close(system.matrix @ found.value + 0.1 * found.value**3, system.b, 1e-6)


def test_zero_takes_no_step(comm):
    system = grid_system(comm)
    found = solve(system.matrix, 0 * system.b, Richardson())
    assert (found.result, found.stats["num_steps"]) == (Result.SUCCESSFUL, 0)
    assert not found.value.any()


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("zero", Result.INACCURATE),
        ("NaN", Result.BREAKDOWN),
        ("too many steps", Result.MAX_STEPS_REACHED),
    ],
)
def test_wrong_solutions_are_errors_on_all_ranks(comm, what, result):
    system = grid_system(comm)
    solver = Returns(what=what)
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=rf"test_own_solvers.py:\d+.*Returns did not converge: {result.message}",
    ):
        solve(system.matrix, system.b, solver)
    quiet = solve(system.matrix, system.b, solver, throw=False)
    assert quiet.result == result
    assert mg.allreduce(jnp.ones(())) == comm.size  # all ranks go on together


def test_input_is_checked_for_own_solvers(comm):
    """A method that declares symmetry does not get a wrong adjoint of another matrix."""
    system = grid_system(comm)
    A = Matrix(system.pattern, jnp.asarray(skewed(system)[system.entries]))
    assert solve(A, system.b, ConjugateResidual(), throw=False).result == Result.NOT_SYMMETRIC
    with pytest.raises(jax.errors.JaxRuntimeError, match=Result.NOT_SYMMETRIC.message):
        solve(A, system.b, ConjugateResidual())
    bad = system.b.at[0].set(jnp.nan) if comm.rank == comm.size - 1 else system.b
    assert solve(system.matrix, bad, Richardson(), throw=False).result == Result.NOT_FINITE
    # An indefinite matrix is not refused: the method takes it.
    shifted = Matrix(system.pattern, system.values).scale_rows(-jnp.ones_like(system.b))
    assert solve(shifted, system.b, ConjugateResidual()).result == Result.SUCCESSFUL


def test_wrong_preconditioners_are_errors(comm):
    system = grid_system(comm)
    for what in ("zero", "negative"):
        solver = PCG(preconditioner=Inverse(what=what))
        result = solve(system.matrix, system.b, solver, throw=False).result
        assert result == Result.NOT_POSITIVE_DEFINITE
    with pytest.raises(jax.errors.JaxRuntimeError, match="or the preconditioner is not"):
        solve(system.matrix, system.b, solver)
    for what, message in (
        ("one entry", r"function of Inverse.inverse must return .* got float64\[1\] on rank"),
        ("single precision", r"must return .* got float32"),
    ):
        with pytest.raises(ValueError, match=message):
            solve(system.matrix, system.b, GMRES(preconditioner=Inverse(what=what)))
    with pytest.raises(TypeError, match=r"Inverse.inverse must return a function r -> z, got None"):
        solve(system.matrix, system.b, GMRES(preconditioner=Inverse(what="no function")))


def test_wrong_types_are_errors(comm):
    system = grid_system(comm)
    for what, error, message in (
        ("no pair", TypeError, r"Returns.iterate must return the pair \(x, num_steps\)"),
        ("one entry", ValueError, r"must return x like b, .* got float64\[1\] on rank"),
        ("float steps", TypeError, "num_steps as an integer scalar, got float"),
    ):
        with pytest.raises(error, match=message):
            solve(system.matrix, system.b, Returns(what=what))

    @dataclasses.dataclass(frozen=True)
    class Weights(Preconditioner):
        weights: np.ndarray

        def inverse(self, A):
            return lambda r: self.weights * r

    for A in (system.matrix, lambda v: 2 * v):
        solver = Richardson(preconditioner=None, damping=np.ones(2))
        with pytest.raises(TypeError, match=r"Richardson must be hashable .*frozen dataclasses"):
            solve(A, system.b, solver)
    with pytest.raises(TypeError, match="GMRES must be hashable"):
        solve(system.matrix, system.b, GMRES(preconditioner=Weights(np.ones(2))))

    class NoIterations(Settings, LinearSolver):
        pass

    with pytest.raises(TypeError, match="abstract"):
        NoIterations()


def test_a_solver_may_refuse_systems(comm):
    @dataclasses.dataclass(frozen=True)
    class Small(Richardson):
        def check(self, pattern, dtype):
            if pattern.n_rows > 10:
                raise ValueError(f"Small: at most 10 rows, got {pattern.n_rows} of {dtype}.")

    system = grid_system(comm)
    with pytest.raises(ValueError, match="Small: at most 10 rows, got 30 of float64"):
        solve(system.matrix, system.b, Small())


@pytest.mark.skipif(not hypre_available(), reason="no hypre")
def test_hypre_and_own_iterations(comm):
    """A subclass uses hypre's method of its parent, unless it has iterations of its own."""
    system = grid_system(comm)
    x = solve(system.matrix, system.b, MyPCG(rtol=TOLERANCE)).value
    close(system.matrix @ x, system.b, 1e-9)

    class OwnIterations(PCG):
        def iterate(self, system):
            return super().iterate(system)

    x = solve(system.matrix, system.b, OwnIterations(rtol=TOLERANCE)).value  # with Jacobi()
    close(system.matrix @ x, system.b, 1e-9)
    refused = BoomerAMG()
    for solver in (OwnIterations(preconditioner=refused), Richardson(preconditioner=refused)):
        with pytest.raises(TypeError, match=r"BoomerAMG works in hypre's PCG.* of its own"):
            solve(system.matrix, system.b, solver)
    own = OwnIterations(rtol=TOLERANCE, preconditioner=Jacobi())
    close(solve(system.matrix, system.b, own).value, x, 1e-9)


@pytest.mark.ranks(1)
def test_final_classes_cannot_be_subclassed():
    for cls in (BoomerAMG, PFMG, Multigrid):
        with pytest.raises(TypeError, match=rf"Mine: {cls.__name__} is final"):
            type("Mine", (cls,), {})
    with pytest.raises(TypeError, match="works in hypre's PCG, GMRES, BiCGStab and Multigrid only"):
        BoomerAMG().inverse(None)  # type: ignore[arg-type]
    pattern = Pattern.from_coo([0], [0], 1)
    with pytest.raises(TypeError, match="expected PCG, GMRES, BiCGStab or a LinearSolver"):
        solve(lambda v: v, jnp.ones(pattern.n_local), Multigrid())
