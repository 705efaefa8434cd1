"""What every solver returns: a value, a result that has a sentence, statistics and a state.

The words are those of lineax and optimistix.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax

__all__ = ["Result", "Solution"]


class Result(enum.IntEnum):
    """How a solve or a minimisation ended. Its number is what compiled programs carry.

    The numbers 0 to 7 are also those of native/hypre/request.h.
    """

    message: str

    def __new__(cls, number: int, message: str) -> Result:
        """Make a member of a number and a sentence."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.message = message
        return member

    SUCCESSFUL = 0, "the solution is as accurate as was asked for"
    MAX_STEPS_REACHED = 1, "max_steps steps were taken before the tolerance was met"
    NOT_FINITE = 2, "NaN or infinity appeared"
    NOT_POSITIVE_DEFINITE = 3, "the matrix is not positive definite"
    NOT_SYMMETRIC = 4, "the matrix is not symmetric"
    BREAKDOWN = 5, "the method broke down: it divided by zero"
    STAGNATED = 6, "rounding errors allow no smaller residual"
    ZERO_DIAGONAL = 7, "the preconditioner divides by a zero on the diagonal"
    NOT_LINEAR = 8, "the operator is not linear"
    LINEAR_SOLVE_FAILED = 9, "the linear solve of a Newton step failed"
    WRONG_JACOBIAN = 10, "the Jacobian is not the derivative of the function"
    SMALL_DECREASE = 11, "the loss decreases by less than ftol"
    NO_DECREASE = 12, "the line search found no smaller loss"
    STOPPED = 13, "the callback stopped it"
    INTERRUPTED = 14, "a signal asked for the end"
    SCIPY_FAILED = 15, "SciPy's method ended without success"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Solution:
    """What `sparse.solve`, `sparse.newton` and `optimize.minimize` return.

    Attributes
    ----------
    value
        The solution. Of arrays that are sharded over ranks it is this rank's part.
    result
        A `Result`, or an integer array of its numbers: 0 is success.
    stats
        Statistics by name, the same on all ranks. Each solver documents its own: `num_steps` is
        among them.
    state
        What the method would need to go on, or None.
    """

    value: Any
    result: Any
    stats: dict[str, Any]
    state: Any = None
