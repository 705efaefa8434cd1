"""The protocol of linear solvers: frozen settings, and iterations on a linear system."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import jax

from mpigrad.sparse.matrix.pattern import Pattern
from mpigrad.sparse.solvers.krylov.system import LinearSystem, Outcome
from mpigrad.sparse.solvers.preconditioners import Preconditioner

__all__ = [
    "INFO",
    "LinearSolver",
    "check_diagonal",
    "check_hashable",
    "check_steps",
    "request_text",
]

# The entries of a solve's info, for each right-hand side and in its real dtype: `Result`, steps,
# relative residual |b - A x| / |b|, set-ups of the preconditioner so far, and the id of the
# matrix's values (0: none).
INFO = 5


class LinearSolver(abc.ABC):
    """A method that solves A x = b. Subclass it to write your own.

    A subclass is a frozen dataclass with the settings of the method, and implements `iterate`.
    Equal settings must be equal and hashable objects, since compiled programs are kept by them.
    `solve` then differentiates the solution, not the iterations: an adjoint solve calls `iterate`
    with the transposed matrix.

    `solve` computes the residual of the vector that `iterate` returns. If the residual is above
    the tolerance, all ranks raise an error, so that a wrong solver cannot give a wrong gradient.

    Attributes
    ----------
    symmetric
        True for a method that accepts symmetric matrices only. Then the matrix is checked, and the
        adjoint solve takes the matrix in place of its transpose. Default: False.
    rtol, max_steps
        The tolerance |b - A x| <= rtol |b|, and the largest number of steps.
    preconditioner
        A `Preconditioner`, or None.
    hypre_method
        The index of hypre's method with this name, or None. A subclass with its own `iterate` has
        none.
    needs_matrix
        True for a method that cannot solve with a function in place of a matrix.
    needs_positive_definite
        True for a method that accepts matrices with a positive diagonal only.
    judges_residual
        True for built-in methods, which check their input and end with the true residual.

    Examples
    --------
    >>> import dataclasses
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from mpigrad import sparse
    >>> @dataclasses.dataclass(frozen=True)
    ... class Richardson(sparse.LinearSolver):
    ...     damping: float = 0.5
    ...     rtol: float = 1e-5
    ...     max_steps: int = 1000
    ...     preconditioner: sparse.Preconditioner | None = None
    ...
    ...     def iterate(self, system):
    ...         (bb,) = system.dots((system.b, system.b))
    ...
    ...         def running(state):
    ...             x, r, rr, steps = state
    ...             return (rr > self.rtol**2 * bb) & (steps < self.max_steps)
    ...
    ...         def step(state):
    ...             x, r, rr, steps = state
    ...             x = x + self.damping * system.precondition(r)
    ...             r = system.b - system.product(x)
    ...             return x, r, system.dots((r, r))[0], steps + 1
    ...
    ...         r = system.b - system.product(system.x0)
    ...         start = system.x0, r, system.dots((r, r))[0], 0
    ...         x, _, _, steps = jax.lax.while_loop(running, step, start)
    ...         return x, steps
    >>> solution = sparse.solve(lambda v: 1.5 * v, jnp.ones(2), Richardson())
    >>> bool(jnp.allclose(solution.value, 2 / 3)), int(solution.stats["num_steps"])
    (True, 9)
    """

    symmetric: ClassVar[bool] = False
    hypre_method: ClassVar[int | None] = None
    needs_matrix: ClassVar[bool] = False
    needs_positive_definite: ClassVar[bool] = False
    judges_residual: ClassVar[bool] = False
    rtol: float
    max_steps: int
    preconditioner: Preconditioner | None

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Reset the attributes that describe the iterations if a subclass has its own."""
        super().__init_subclass__(**arguments)
        if "iterate" in cls.__dict__:
            cls.hypre_method = cls.__dict__.get("hypre_method")
            cls.judges_residual = cls.__dict__.get("judges_residual", False)

    @property
    def transposed(self) -> LinearSolver:
        """The same method for the transposed matrix."""
        return self

    @property
    def by_hypre(self) -> bool:
        """True if hypre solves, since the preconditioner is one of hypre's."""
        return self.preconditioner is not None and self.preconditioner.by_hypre

    def check(self, pattern: Pattern, dtype: Any) -> None:  # noqa: B027 (a hook, not abstract)
        """Raise an error if the method cannot solve such a system. The default accepts all.

        Parameters
        ----------
        pattern
            The matrix's pattern.
        dtype
            The common dtype of the matrix and the right-hand side.
        """

    @abc.abstractmethod
    def iterate(self, system: LinearSystem) -> tuple[jax.Array, Any] | Outcome:
        """Solve one system (collective, traced).

        Parameters
        ----------
        system
            This rank's part of A x = b: its product, its preconditioner, and inner products over
            all ranks. Loops must end on the same step on all ranks: decide from `system.dots`.

        Returns
        -------
        x
            This rank's part of the solution, like `system.b`.
        num_steps
            The number of steps taken, an integer scalar, the same on all ranks.
        """


def check_hashable(solver: LinearSolver) -> None:
    """Raise an error if compiled programs cannot be kept by this solver."""
    try:
        hash(solver)
    except TypeError as error:
        raise TypeError(
            f"solve: {type(solver).__name__} must be hashable with its preconditioner, got "
            f'"{error}". Make both frozen dataclasses, and compute arrays in `iterate` and '
            "`inverse`."
        ) from None


def request_text(solver: LinearSolver) -> str:
    """Return the settings of a solve by a library, which must be the same on all ranks."""
    restart = getattr(solver, "restart", None)
    return (
        f"{type(solver).__name__}(preconditioner={solver.preconditioner!r}, "
        f"rtol={float(solver.rtol)!r}, max_steps={int(solver.max_steps)}"
        + (f", restart={int(restart)})" if restart is not None else ")")
    )


def check_steps(name: str, rtol: float, max_steps: int) -> None:
    """Raise an error if the tolerance or the number of steps is out of range."""
    if not 0 < rtol < 1:
        raise ValueError(
            f"{name}: rtol must lie between 0 and 1, got rtol={rtol}. Choose one such as 1e-8."
        )
    if not 0 < max_steps < 2**31:
        raise ValueError(
            f"{name}: max_steps must be positive and below 2**31, got max_steps={max_steps}. "
            "Choose one such as 500."
        )


def check_diagonal(pattern: Pattern, name: str) -> None:
    """Raise an error if the pattern lacks a diagonal entry, by which `name` divides."""
    if pattern.row_without_diagonal >= 0:
        raise ValueError(
            f"solve: {name} needs a diagonal entry in every row, but the pattern has none in row "
            f"{pattern.row_without_diagonal}. Add the entry (i, i) to the pattern for every row i."
        )
