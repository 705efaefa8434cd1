"""What every linear solver is: a frozen strategy object."""

from __future__ import annotations

import abc
import enum
from typing import Any, ClassVar

import jax

from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.preconditioners import Preconditioner

__all__ = ["INFO", "LinearSolver", "Result", "check_diagonal", "check_steps"]

INFO = 5  # numbers that a solver reports for each right-hand side


class Result(enum.IntEnum):
    """What came of a solve (the numbers of native/hypre/request.h).

    Where the solve broke down, and where it could not start (NaN or infinity, a matrix that is not
    symmetric or not positive definite for PCG, a zero on the diagonal that a preconditioner divides
    by), the solution is NaN. Where it stopped early (at max_steps, or where rounding allows no
    smaller residual) the solution is what was reached.
    """

    SUCCESSFUL = 0
    MAX_STEPS_REACHED = 1
    NOT_FINITE = 2
    NOT_POSITIVE_DEFINITE = 3
    NOT_SYMMETRIC = 4
    BREAKDOWN = 5
    STAGNATED = 6
    ZERO_DIAGONAL = 7
    NOT_LINEAR = 8  # of operators
    LINEAR_SOLVE_FAILED = 9  # of newton, as what follows
    WRONG_JACOBIAN = 10


class LinearSolver(abc.ABC):
    """A way to solve A x = b.

    Subclasses are frozen dataclasses: equal settings are equal objects.

    Attributes
    ----------
    symmetric
        Whether it takes symmetric matrices only, so that a transposed solve is the same solve.
    rtol, max_steps
        Stop at |b - A x| <= rtol |b|; most iterations.
    preconditioner
        An approximate inverse, or None.
    transposed
        The same method for the transposed matrix.
    """

    symmetric: ClassVar[bool]
    rtol: float
    max_steps: int
    preconditioner: Preconditioner | None

    @property
    def transposed(self) -> LinearSolver:
        return self

    @abc.abstractmethod
    def check(self, pattern: Pattern, dtype: Any) -> None:
        """Raise, on every rank alike, if this solver cannot solve such a system here."""

    @abc.abstractmethod
    def run(
        self,
        pattern: Pattern,
        values: jax.Array,
        b: jax.Array,
        x0: jax.Array,
        known: jax.Array,
        *,
        throw: bool,
        site: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Solve for each right-hand side in turn (collective).

        Parameters
        ----------
        values
            Shape (1, nnz), or (B, nnz) for a matrix of each right-hand side's own.
        b
            Shape (B, n_local).
        x0
            Where the iterations start, shape (B, n_local), or (B, 0) for zeros, which must cost
            nothing.
        known
            Shape (1,): the last number in the info of an earlier solve with these very values,
            which then need not be compared with the latest; shape (0,) where there is none.

        Returns
        -------
        x of shape (B, n_local); info of shape (B, INFO), in the real dtype of b: `Result`,
        iterations, relative residual |b - A x| / |b|, set-ups done so far for this pattern and
        preconditioner, and a number of the values (0: none).
        """


def check_steps(name: str, rtol: float, max_steps: int) -> None:
    """Refuse tolerances and numbers of iterations that make no sense."""
    if not 0 < rtol < 1:
        raise ValueError(f"{name}: rtol={rtol} must lie between 0 and 1")
    if not 0 < max_steps < 2**31:
        raise ValueError(f"{name}: max_steps={max_steps} must be positive and below 2**31")


def check_diagonal(pattern: Pattern, what: str) -> None:
    """Refuse patterns without a full diagonal, which `what` divides by."""
    if pattern.row_without_diagonal >= 0:
        raise ValueError(
            f"solve: row {pattern.row_without_diagonal} has no diagonal entry in the pattern, "
            f"which {what} needs; add the entry (i, i) for every row i"
        )
