"""Solves by iterations written in JAX: how they run, how they are scaled, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.extend import describe, mark_common_branch
from mpigrad.operations import allreduce, require
from mpigrad.solution import Result
from mpigrad.sparse.matrix.matrix import Matrix
from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.krylov import RUNNING, LinearSystem, Outcome
from mpigrad.sparse.solvers.methods import LinearSolver

__all__ = [
    "check",
    "has_usual_squares",
    "largest",
    "normalizing",
    "refuse_overflow",
    "require_success",
    "run",
    "scaled",
    "scaled_map",
    "solve_system",
]

# ---- Linear systems scaled by powers of two, so that no square of a number overflows or
# vanishes
#
# A' x' = b' with A' = 2^a A and b' = 2^s b has the solution x' = 2^(s - a) x. Powers of two are
# exact, so a solve at another scale has the same steps and the same digits.


_PADDING = 16  # numbers


def largest(x: jax.Array, axis: int = -1) -> jax.Array:
    """Return the largest absolute value of a real or imaginary part along an axis, 0 if empty."""
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    return jnp.max(jnp.stack([jnp.max(jnp.abs(p), axis=axis, initial=0) for p in parts]), axis=0)


def normalizing(sizes: Sequence[jax.Array], comm: Communicator) -> list[jax.Array]:
    """Return for each number e, so that 2^e times its maximum over ranks is about 1.

    The numbers are real arrays, from `largest`. e is 0 where the maximum is 0 or not finite. One
    message is sent.
    """
    flat = jnp.concatenate([jnp.ravel(size) for size in sizes])
    most = allreduce(_padded(flat), MPI.MAX, comm=comm)[: len(flat)]
    usual = jnp.isfinite(most) & (most > 0)
    exponents = jnp.where(usual, -jnp.frexp(jnp.where(usual, most, 1))[1], 0)
    ends = np.cumsum([size.size for size in sizes])[:-1]
    return [e.reshape(s.shape) for e, s in zip(jnp.split(exponents, ends), sizes, strict=True)]


def has_usual_squares(b: jax.Array, comm: Communicator) -> jax.Array:
    """Return whether |b|^2 of all rows (B, n) is far from both ends of float64, over all ranks."""
    squares = jax.vmap(jnp.vdot)(b, b).real
    total = allreduce(_padded(squares), comm=comm)[: len(squares)]
    return jnp.all((total > 1e-200) & (total < 1e200))


def _padded(numbers: jax.Array) -> jax.Array:
    """Return as many numbers as ranks with other numbers of right-hand sides usually have.

    So the solver finds the difference, and can name it.
    """
    return jnp.pad(numbers, (0, -len(numbers) % _PADDING))


def scaled(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return 2^exponent x. The exponent has the leading axes of x."""
    real = jnp.finfo(x.dtype).dtype
    most = jnp.finfo(real).maxexp - 2  # of a factor whose inverse is no subnormal number
    exponent = jnp.clip(exponent, -3 * most, 3 * most)
    for left in (3, 2, 1):
        part = exponent // left
        factor = jnp.ldexp(jnp.ones((), real), part)
        x = x * factor.reshape(factor.shape + (1,) * (x.ndim - factor.ndim))
        exponent = exponent - part
    return x


def scaled_map(
    linear: Callable[[jax.Array], jax.Array], v: jax.Array, exponent: jax.Array
) -> jax.Array:
    """Return 2^exponent linear(v), so that neither small nor large products are lost."""
    return scaled(linear(scaled(v, jnp.maximum(exponent, 0))), jnp.minimum(exponent, 0))


def refuse_overflow(
    x: jax.Array, exponent: jax.Array, info: jax.Array, comm: Communicator, head: str, throw: bool
) -> jax.Array:
    """Return `info` with the result TOO_LARGE where 2^exponent x is too large for its dtype."""
    most = int(jnp.finfo(x.dtype).maxexp)

    def power() -> jax.Array:
        size = allreduce(largest(jnp.where(jnp.isfinite(x), x, 0)), MPI.MAX, comm=comm)
        return jnp.frexp(size)[1] + exponent

    # The exponents are the same on all ranks. x is the solution of a scaled system.
    possible = jnp.any(exponent > most // 4)
    powers = jax.lax.cond(
        possible, mark_common_branch(power), lambda: jnp.zeros(info.shape[:-1], "int32")
    )
    result = info[..., 0]
    over = (result == Result.SUCCESSFUL) & (powers > most)
    if throw:
        name = np.dtype(x.dtype).name
        text = (
            f"{head}{Result.TOO_LARGE.message}: {name} holds numbers up to 2^{most}, and the "
            "largest entry of the solution is about 2^{}. Scale the system, or use float64 arrays."
        )
        require(~jnp.any(over), text, jnp.max(powers), comm=comm)
    return info.at[..., 0].set(jnp.where(over, Result.TOO_LARGE, result).astype(info.dtype))


# ---- Errors of solves that failed, the same on every rank ----


def require_success(
    solver: LinearSolver, info: jax.Array, comm: Communicator, head: str, *, operator: bool = False
) -> None:
    """Raise on every rank, with the reason and a remedy, unless `info` holds a success."""
    result, steps, residual = info[0], info[1], info[2]
    name, single = type(solver).__name__, np.dtype(info.dtype) == np.float32
    kind = "the operator" if operator else "the matrix"
    for failure, text in _wrong_input(name, operator).items():
        require(result != failure, f"{head}{text}", comm=comm)
    remedy_of_rounding = "rtol=1e-5, or float64 arrays" if single else "a larger rtol"
    values = "the relative residual is {} after {} steps"
    restart = getattr(solver, "restart", None)  # of GMRES
    longer = "" if restart is None else f"restart={restart} or "
    remedy = (
        f"Raise {longer}max_steps={solver.max_steps}, loosen rtol, or take a better preconditioner"
    )
    stagnated, failed = result == Result.STAGNATED, f"{head}{name} did not converge: "
    above = f"{values}, above the tolerance {solver.rtol:.3g}"
    by_rounding = residual <= np.finfo(info.dtype).eps ** 0.5
    by_restart = ~by_rounding & (False if restart is None else steps >= restart)
    for cause, text in (
        (
            by_rounding,
            f"rounding errors allow no smaller residual: {above}. Take {remedy_of_rounding}.",
        ),
        (
            by_restart,
            f"the residual no longer decreases between restarts: {above}. Raise restart={restart}, "
            f"or take a better preconditioner. If {kind} is singular, give its null space as "
            "nullspace=.",
        ),
        (
            ~by_rounding & ~by_restart,
            f"{Result.STAGNATED.message}: {above}. {kind.capitalize()} is singular, or nearly: "
            "give its null space as nullspace=, or check how it is made.",
        ),
    ):
        require(~(stagnated & cause), failed + text, residual, steps, comm=comm)
    for failure, text in {
        Result.BREAKDOWN: (
            f"{name} did not converge: {Result.BREAKDOWN.message}, and {values}. Check that {kind} "
            "is not singular (give nullspace= if it is), or take GMRES or a better preconditioner."
        ),
        Result.INACCURATE: (
            f"{name} did not converge: {Result.INACCURATE.message}, {solver.rtol:.3g}: {values}. "
            f"Check {name}.iterate and the preconditioner."
        ),
        Result.MAX_STEPS_REACHED: (
            f"{name} did not converge: {Result.MAX_STEPS_REACHED.message}, and {values}, above the "
            f"tolerance {solver.rtol:.3g}. {remedy}. solve(..., throw=False) returns the last "
            "iterate."
        ),
    }.items():
        require(result != failure, f"{head}{text}", residual, steps, comm=comm)


def _wrong_input(name: str, operator: bool) -> dict[Result, str]:
    """Return the texts for systems that no method can solve."""
    spd = f"PCG needs a symmetric positive definite {'operator' if operator else 'matrix'}"
    if operator:
        finite = "the right-hand side, or the operator's result for a finite vector"
        symmetric = "the operator is not symmetric"
        definite = "the operator (or its `inverse`) is not positive definite"
        entries = negative = ""
    else:
        finite = "the matrix, the right-hand side or x0"
        symmetric = Result.NOT_SYMMETRIC.message
        definite = f"{Result.NOT_POSITIVE_DEFINITE.message} (or the preconditioner is not)"
        entries = (
            "Give entries (i, j) and (j, i) the same value, also if i and j belong to different "
            "ranks, or solve"
        )
        negative = "If all diagonal entries are negative, solve with -A and -b. Otherwise solve"
    not_definite = f"{definite}, but {spd}. {negative or 'Solve'} with GMRES()."
    if name == "MINRES":
        not_definite = (
            "the preconditioner is not positive definite, but MINRES needs one that is. Take "
            "another one, or solve with GMRES()."
        )
    return {
        Result.NOT_FINITE: (
            f"{Result.NOT_FINITE.message}: {finite} holds such a value. Look for a division by "
            "zero or an overflow in the code that computes them."
        ),
        Result.NOT_POSITIVE_DEFINITE: not_definite,
        Result.NOT_SYMMETRIC: (
            f"{symmetric}, but this solver needs a symmetric one. {entries or 'Solve'} with "
            "GMRES() or BiCGStab()."
        ),
        Result.NOT_LINEAR: (
            f"{Result.NOT_LINEAR.message}: f(v) differs from its derivative along v. Bring "
            "constant terms to the right-hand side, or use newton for F(x) = 0."
        ),
    }


# ---- Run a solver's iterations on a linear system, and judge the vector that they return ----


def solve_system(solver: LinearSolver, system: LinearSystem) -> tuple[jax.Array, jax.Array]:
    """Return x of shape (n_local,), and the info of shape (INFO,)."""
    end = solver.iterate(system) if solver.judges_residual else _judged(solver, system)
    assert isinstance(end, Outcome)
    residual = jnp.where(end.bb > 0, jnp.sqrt(end.rr / end.bb), 0)
    valid = False
    for result in (
        Result.SUCCESSFUL, Result.MAX_STEPS_REACHED, Result.STAGNATED, Result.INACCURATE,
    ):  # fmt: skip
        valid |= end.result == result
    x = jnp.where(valid, end.x, jnp.nan)
    none = 0 * residual
    numbers = (end.result, end.num_steps, residual, none, none)
    return x, jnp.stack([v.astype(residual.dtype) for v in numbers])


def _judged(solver: LinearSolver, system: LinearSystem) -> Outcome:
    """Run a user's iterations and compute the residual of their result, whatever they report."""
    if solver.symmetric:
        bb, _, state = system.begin_symmetric()
    else:
        bb, _, state, _ = system.begin()

    def run() -> tuple[jax.Array, jax.Array, jax.Array]:
        x, num_steps = _checked(solver, system, solver.iterate(system))
        r = system.b - system.product(x)
        return x, num_steps, system.dots((r, r))[0].real

    def skip() -> tuple[jax.Array, jax.Array, jax.Array]:  # x = 0 solves A x = 0
        return jnp.zeros_like(system.b), jnp.zeros((), "int32"), jnp.zeros_like(bb)

    x, num_steps, rr = jax.lax.cond((state == RUNNING) & (bb > 0), mark_common_branch(run), skip)
    # The residual that the solver has computed may differ from this one by rounding.
    goal = (system.rtol + 10 * jnp.finfo(bb.dtype).eps) ** 2 * bb
    result = jnp.where(num_steps >= system.max_steps, Result.MAX_STEPS_REACHED, Result.INACCURATE)
    result = jnp.where(rr <= goal, Result.SUCCESSFUL, result)
    result = jnp.where(jnp.isfinite(rr), result, Result.BREAKDOWN)
    result = jnp.where(state == RUNNING, result, state).astype("int32")
    return Outcome(x, rr, bb, num_steps, result)


def _checked(solver: LinearSolver, system: LinearSystem, end: Any) -> tuple[jax.Array, jax.Array]:
    """Check the types and shapes of the values that `iterate` returned."""
    name = type(solver).__name__
    if isinstance(end, Outcome):
        return end.x, jnp.asarray(end.num_steps, "int32")
    if not isinstance(end, tuple) or len(end) != 2:
        raise TypeError(
            f"solve: {name}.iterate must return the pair (x, num_steps), got "
            f"{type(end).__name__}. Return the solution and the number of steps."
        )
    x, num_steps = jnp.asarray(end[0]), jnp.asarray(end[1])
    if x.shape != system.b.shape or x.dtype != system.b.dtype:
        raise ValueError(
            f"solve: {name}.iterate must return x like b, {system.b.dtype}"
            f"{list(system.b.shape)}, got {x.dtype}{list(x.shape)} on rank {system.comm.rank}. "
            "Return this rank's part of the solution."
        )
    if num_steps.shape != () or not jnp.issubdtype(num_steps.dtype, jnp.integer):
        raise TypeError(
            f"solve: {name}.iterate must return num_steps as an integer scalar, got "
            f"{num_steps.dtype}{list(num_steps.shape)}. Count the steps in the loop's state."
        )
    return x, num_steps.astype("int32")


# ---- Solves with matrices by iterations written in JAX ----


def check(solver: LinearSolver, pattern: Pattern, dtype: Any) -> None:
    """Raise an error, the same on every rank, if the iterations cannot solve such a system."""
    del pattern
    if solver.needs_positive_definite and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{type(solver).__name__}: it solves real systems, got {np.dtype(dtype).name}. Take "
            "GMRES or BiCGStab, which solve complex systems."
        )


def run(
    solver: LinearSolver,
    pattern: Pattern,
    values: jax.Array,
    b: jax.Array,
    x0: jax.Array,
    values_id: jax.Array | None = None,
    null: jax.Array | None = None,
    *,
    throw: bool,
    site: int,
) -> tuple[jax.Array, jax.Array]:
    """Solve for each right-hand side in turn, by `LinearSolver.iterate`.

    Parameters
    ----------
    values
        Shape (1, nnz), or (B, nnz) if each right-hand side has a matrix of its own.
    b
        Shape (B, n_local).
    x0
        The first guesses, shape (B, n_local), or (B, 0) for zeros.
    values_id, null
        Not used: see `hypre.run`.

    Returns
    -------
    x of shape (B, n_local), and the info of shape (B, INFO).
    """
    del values_id, null
    n = b.shape[0]
    if x0.shape != b.shape:
        x0 = jnp.zeros_like(b)

    def one(k: Any) -> tuple[jax.Array, jax.Array]:
        matrix = Matrix(pattern, values[k if values.shape[0] > 1 else 0])
        x, info = solve_system(solver, _system(solver, matrix, b[k], x0[k]))
        if throw:
            require_success(solver, info, pattern.comm, f"solve, {describe(site)}: ")
        return x, info

    if n == 1:
        x, info = one(0)
        return x[None], info[None]
    return jax.lax.map(one, jnp.arange(n))


def _system(solver: LinearSolver, matrix: Matrix, b: jax.Array, x0: jax.Array) -> LinearSystem:
    pattern, diagonal = matrix.pattern, matrix.diagonal()
    scale = jnp.where(diagonal.real > 0, jnp.abs(jnp.where(diagonal == 0, 1, diagonal)) ** -0.5, 1)
    real = jnp.issubdtype(diagonal.dtype, jnp.floating)
    return LinearSystem(
        product=lambda v: matrix @ v,
        precondition=_inverse(solver, matrix),
        b=b,
        x0=x0,
        rtol=solver.rtol,
        max_steps=solver.max_steps,
        comm=pattern.comm,
        first=pattern.offset,
        wrong=~jnp.isfinite(matrix.values).all(),
        negative=(diagonal <= 0).any() if solver.needs_positive_definite and real else False,
        scale=scale if solver.symmetric else 1.0,
    )


def _inverse(solver: LinearSolver, matrix: Matrix) -> Callable[[jax.Array], jax.Array]:
    """Return the preconditioner as a function that checks its result."""
    preconditioner = solver.preconditioner
    if preconditioner is None:
        return lambda r: r
    name = type(preconditioner).__name__
    inverse = preconditioner.inverse(matrix)
    if not callable(inverse):
        raise TypeError(
            f"solve: {name}.inverse must return a function r -> z, got "
            f"{type(inverse).__name__}. Return the function that applies the preconditioner."
        )

    def checked(r: jax.Array) -> jax.Array:
        z = jnp.asarray(inverse(r))
        if z.shape != r.shape or z.dtype != r.dtype:
            raise ValueError(
                f"solve: the function of {name}.inverse must return an array like its argument, "
                f"{r.dtype}{list(r.shape)}, got {z.dtype}{list(z.shape)} on rank "
                f"{matrix.pattern.comm.rank}. Return this rank's part of the vector."
            )
        return z

    return checked
