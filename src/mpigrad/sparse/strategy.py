"""What every linear solver is: a frozen strategy object."""

from __future__ import annotations

import abc
import enum
from typing import Any

import jax

from mpigrad.sparse.pattern import Pattern

__all__ = ["LinearSolver", "Result"]


class Result(enum.IntEnum):
    """What came of a solve (the numbers of native/hypre.cc)."""

    SUCCESSFUL = 0
    MAX_STEPS_REACHED = 1
    NOT_FINITE = 2
    NOT_POSITIVE_DEFINITE = 3
    NOT_SYMMETRIC = 4


class LinearSolver(abc.ABC):
    """A way to solve A x = b for a symmetric positive definite matrix A.

    Subclasses are frozen dataclasses: equal settings are equal objects.
    """

    @abc.abstractmethod
    def check(self, pattern: Pattern, dtype: Any) -> None:
        """Raise, on every rank alike, if this solver cannot solve such a system here."""

    @abc.abstractmethod
    def run(
        self, pattern: Pattern, values: jax.Array, b: jax.Array, *, throw: bool, site: int
    ) -> tuple[jax.Array, jax.Array]:
        """Solve for each right-hand side in turn (collective).

        Parameters
        ----------
        values
            Shape (1, nnz), or (B, nnz) for a matrix of each right-hand side's own.
        b
            Shape (B, n_local).

        Returns
        -------
        x of shape (B, n_local); info of shape (B, 4), in the dtype of b: `Result`, iterations,
        relative residual |b - A x| / |b|, set-ups done so far for this pattern and solver.
        """


def check_steps(name: str, rtol: float, max_steps: int) -> None:
    if not 0 < rtol < 1:
        raise ValueError(f"{name}: rtol={rtol} must lie between 0 and 1")
    if not 0 < max_steps < 2**31:
        raise ValueError(f"{name}: max_steps={max_steps} must be positive and below 2**31")
