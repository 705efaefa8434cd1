"""What `minimize` returns, and what it notes of each iteration."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

__all__ = ["NotFiniteError", "Record", "Result", "Solution"]


class NotFiniteError(RuntimeError):
    """The loss of the first point, or the norm of its gradient, is no finite number."""


class Result(enum.StrEnum):
    """Why a minimisation ended."""

    CONVERGED = "the gradient is small enough"
    SMALL_DECREASE = "the loss hardly decreases"
    ITERATIONS = "all iterations are done"
    NO_DECREASE = "no smaller loss was found"
    NOT_FINITE = "the loss is not a number"
    STOPPED = "the callback stopped it"
    INTERRUPTED = "it was asked to end"
    OWN_TOLERANCES = "SciPy's own tolerances are met"
    OWN_END = "SciPy has ended without success"


@dataclasses.dataclass(frozen=True)
class Record:
    """One iteration; the same on all ranks but for the seconds, which are rank 0's on disk.

    Attributes
    ----------
    iteration
        0 is the first point.
    loss, gradient_norm
        The global loss and the two-norm of its gradient over all unknowns.
    step
        The step of the line search, or the length of the step where a method has none.
    evaluations
        Values with gradients computed so far.
    seconds
        Since the start, those of earlier runs that were saved included.
    """

    iteration: int
    loss: float
    gradient_norm: float
    step: float
    evaluations: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Solution:
    """What `minimize` returns.

    Attributes
    ----------
    value
        The unknowns at the end, a tree such as x0; of sharded leaves this rank's part.
    loss, gradient_norm
        There; equal on all ranks.
    result
        A `Result`.
    history
        A `Record` of each iteration.
    stats
        "iterations", "evaluations" (values with gradients) and "products" (of a Hessian with a
        vector).
    state
        The method's own.
    asked_to_end
        With a checkpoint, a signal asked for the end, whatever `result` says: nothing else should
        be begun.
    """

    value: Any
    loss: float
    gradient_norm: float
    result: Result
    history: tuple[Record, ...] = dataclasses.field(repr=False)
    stats: dict[str, int]
    state: Any = dataclasses.field(repr=False)
    asked_to_end: bool = False
