"""The common return type of all solvers: a value, a result code, statistics and a state.

The names are those of lineax and optimistix.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import operator
from typing import Any

import jax
import numpy as np

__all__ = ["Result", "Solution"]


class Result(enum.IntEnum):
    """The way in which a solve or a minimisation ended.

    Compiled programs carry the integer. `message` is the sentence that errors show. The integers 0
    to 7 are also those of native/hypre/request.h.

    If a linear solve breaks down or cannot start (NOT_FINITE, NOT_POSITIVE_DEFINITE,
    NOT_SYMMETRIC, BREAKDOWN, ZERO_DIAGONAL, NOT_LINEAR, INCONSISTENT, WRONG_NULLSPACE), its value
    is NaN. If it stops early (MAX_STEPS_REACHED, STAGNATED, INACCURATE), its value is the last
    iterate.

    Examples
    --------
    >>> from mpigrad.sparse import Result
    >>> Result.SUCCESSFUL == 0
    True
    >>> Result(4).name, Result(4).message
    ('NOT_SYMMETRIC', 'the matrix is not symmetric')
    """

    message: str

    def __new__(cls, number: int, message: str) -> Result:
        """Make a member of an integer and a sentence."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.message = message
        return member

    def __str__(self) -> str:
        """Return the name and the sentence."""
        return f"{self.name} ({self.message})"

    SUCCESSFUL = 0, "the solution is as accurate as the tolerance asks"
    MAX_STEPS_REACHED = 1, "max_steps steps were taken before the tolerance was met"
    NOT_FINITE = 2, "NaN or infinity appeared"
    NOT_POSITIVE_DEFINITE = 3, "the matrix is not positive definite"
    NOT_SYMMETRIC = 4, "the matrix is not symmetric"
    BREAKDOWN = 5, "the method broke down: it divided by zero, or its numbers overflowed"
    STAGNATED = 6, "the residual no longer decreases"
    ZERO_DIAGONAL = 7, "the preconditioner divides by a zero on the diagonal"
    NOT_LINEAR = 8, "the operator is not linear"
    LINEAR_SOLVE_FAILED = 9, "the linear solve of a Newton step failed"
    WRONG_JACOBIAN = 10, "the Jacobian is not the derivative of the function"
    SMALL_DECREASE = 11, "the loss decreases by less than ftol"
    NO_DECREASE = 12, "the line search found no smaller loss"
    STOPPED = 13, "the callback stopped it"
    INTERRUPTED = 14, "a signal asked for the end"
    INACCURATE = 16, "the residual of the vector that the solver returned is above the tolerance"
    TOO_LARGE = 17, "the solution is too large for its dtype"
    INCONSISTENT = 18, "the right-hand side is not in the range of the singular matrix"
    WRONG_NULLSPACE = 19, "the given vectors are not a null space of the matrix"
    STEP_TOO_SMALL = 20, "a time step became too small"
    NOT_STORED = 21, "a state could not be written to a file"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Solution:
    """The return value of `sparse.solve`, `sparse.newton`, `ode.integrate`, `optimize.minimize`.

    Attributes
    ----------
    value
        The solution. If it is sharded over ranks, this rank's part.
    result
        A `Result`, or an integer array of its numbers: 0 is success.
    stats
        Statistics by name, the same on all ranks. Each solver documents its own. `num_steps` is
        always among them.
    state
        The data that the method needs to continue, or None.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import PCG, Result, solve
    >>> solution = solve(lambda v: 2 * v, jnp.ones(3), PCG())
    >>> solution.value
    Array([0.5, 0.5, 0.5], dtype=float32)
    >>> Result(int(solution.result)).name, int(solution.stats["num_steps"])
    ('SUCCESSFUL', 1)
    """

    value: Any
    result: Any
    stats: dict[str, Any]
    state: Any = None

    def __repr__(self) -> str:
        """Return the shapes of the value, the result and the statistics that are one number."""
        value = jax.tree.map(_Shape.of, self.value)
        result = self.result
        with contextlib.suppress(Exception):  # a tracer, an array of several, a placeholder
            result = Result(operator.index(result))
        stats = self.stats if isinstance(self.stats, dict) else {}
        numbers = [f", {name}={x}" for name, x in stats.items() if getattr(x, "ndim", 0) == 0]
        return f"Solution(value={value}, result={result}{''.join(numbers)})"


class _Shape(str):
    """A text without quotation marks in the `repr` of a pytree."""

    __slots__ = ()
    __repr__ = str.__str__

    @classmethod
    def of(cls, x: Any) -> _Shape:
        """Return `float32[3]` for an array."""
        is_array = isinstance(x, jax.Array | np.ndarray) and x.dtype.kind not in "OSU"
        return cls(jax.typeof(x).str_short() if is_array else repr(x))
