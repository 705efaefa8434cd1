"""Linear solves at every scale of the dtype: x of (2^a A) x = 2^b b is 2^(b - a) x, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.sparse import (
    GMRES,
    PCG,
    BiCGStab,
    BoxMG,
    Guesses,
    Jacobi,
    LinearSolver,
    Matrix,
    Multigrid,
    Operator,
    Pattern,
    solve,
)

Solve = Callable[[Any, Any], Any]  # (values of A, b) -> x
OWN = {
    "PCG": lambda rtol: PCG(rtol=rtol, preconditioner=Jacobi()),
    "GMRES": lambda rtol: GMRES(rtol=rtol, preconditioner=None),
    "BiCGStab": lambda rtol: BiCGStab(rtol=rtol, preconditioner=Jacobi()),
}
# Their matrices are not scaled: the library squares none of their entries in this range.
LIBRARIES = {
    "BoomerAMG": lambda rtol: PCG(rtol=rtol),
    "GMRES of hypre": lambda rtol: GMRES(rtol=rtol),
    "Multigrid": lambda rtol: Multigrid(rtol=rtol),
    "BoxMG": lambda rtol: PCG(rtol=rtol, preconditioner=BoxMG()),
}


@functools.cache
def system(comm: Communicator) -> tuple[Pattern, np.ndarray, np.ndarray]:
    """Return a pattern on a grid, the values of a matrix on it, and a right-hand side."""
    grid = Grid((8, 6), (1.0, 1.0), comm)
    steps = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]
    pattern = Pattern.from_stencil(grid, steps)
    fields = [jnp.full(grid.local_shape, 4.5 if step == (0, 0) else -1.0) for step in steps]
    values = np.asarray(Matrix.assemble(pattern, fields).values)
    b = 1.5 + np.cos(np.arange(pattern.n_local) + pattern.offset)
    return pattern, values, b


def by_matrix(solver: LinearSolver, pattern: Pattern) -> Solve:
    return lambda v, b: solve(Matrix(pattern, v), b, solver).value


def by_function(solver: LinearSolver, pattern: Pattern) -> Solve:
    def solved(v: Any, b: Any) -> Any:
        matrix = Matrix(pattern, v)
        function = lambda x: matrix @ x
        inverse = None
        if solver.preconditioner is not None:
            inverse = lambda r: r / matrix.diagonal()
        bare = type(solver)(rtol=solver.rtol, preconditioner=None)
        return solve(Operator(function, inverse), b, bare).value

    return solved


def powers(dtype: Any) -> list[int]:
    """Return exponents from the smallest to the largest, with room for the entries."""
    most = int(jnp.finfo(dtype).maxexp) - 8
    return [-most, -most // 2, -most // 3, -1, 1, most // 3, most // 2, most]


def check(solved: Solve, comm: Communicator, dtype: Any, of_matrix: bool, gradient: bool) -> None:
    """Compare values, and gradients for small and large cotangents, with those at the scale 1."""
    _, values, b = system(comm)
    v, b = jnp.asarray(values, dtype), jnp.asarray(b, dtype)

    @mg.jit
    def run(v: Any, b: Any, cotangent: Any) -> Any:
        loss = lambda b: jnp.sum(cotangent * solved(v, b))
        return solved(v, b), mg.grad(loss)(b) if gradient else b

    def scale(x: Any, power: int) -> Any:
        return jnp.asarray(np.ldexp(np.asarray(x), power))

    most = int(jnp.finfo(dtype).maxexp)
    x, slope = (np.asarray(y) for y in run(v, b, b))
    for of_a in powers(dtype) if of_matrix else [0]:
        for of_b in [0, *powers(dtype)]:
            power = of_b - of_a
            if power > most + 1:
                with pytest.raises(jax.errors.JaxRuntimeError, match="too large for its dtype"):
                    run(scale(v, of_a), scale(b, of_b), b)
            elif abs(power) < most - 4:
                got = run(scale(v, of_a), scale(b, of_b), scale(b, of_b))
                np.testing.assert_array_equal(got[0], np.ldexp(x, power))
                if gradient:
                    np.testing.assert_array_equal(got[1], np.ldexp(slope, power))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OWN)
def test_own_methods(name: str, dtype: str, comm: Communicator) -> None:
    solver = OWN[name](1e-4 if dtype == "float32" else 1e-8)
    check(by_matrix(solver, system(comm)[0]), comm, dtype, of_matrix=True, gradient=name == "PCG")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OWN)
def test_functions(name: str, dtype: str, comm: Communicator) -> None:
    solver = OWN[name](1e-4 if dtype == "float32" else 1e-8)
    check(by_function(solver, system(comm)[0]), comm, dtype, of_matrix=True, gradient=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries(name: str, comm: Communicator) -> None:
    solver = LIBRARIES[name](1e-8)
    check(by_matrix(solver, system(comm)[0]), comm, "float64", of_matrix=False, gradient=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["matrix", "function"])
def test_guesses(by: str, comm: Communicator) -> None:
    """A solve that repeats an earlier one begins at its solution."""
    pattern, values, b = system(comm)
    v, b = jnp.asarray(values, jnp.float32), jnp.asarray(b, jnp.float32)
    solver = PCG(rtol=1e-4, preconditioner=Jacobi() if by == "matrix" else None)
    matrix = Matrix(pattern, v)
    A = matrix if by == "matrix" else lambda x: matrix @ x
    for power in (0, -80, 80):
        guesses = Guesses.empty(b)
        for _ in range(2):
            solution = solve(A, jnp.ldexp(b, power), solver, x0=guesses)
            guesses = solution.state
        assert int(solution.stats["num_steps"]) == 0


@pytest.mark.ranks(2)
def test_zeros_and_nan(comm: Communicator) -> None:
    """Zero has no scale, and NaN is no question of scale."""
    pattern, values, b = system(comm)
    matrix = Matrix(pattern, jnp.asarray(values, jnp.float32))
    solver = OWN["PCG"](1e-4)
    assert not np.any(solve(matrix, jnp.zeros_like(b, jnp.float32), solver).value)
    with pytest.raises(jax.errors.JaxRuntimeError, match="NaN or infinity appeared"):
        solve(matrix, jnp.full(b.shape, jnp.nan, jnp.float32), solver)
