"""The record of an iteration, and the errors of `minimize`."""

from __future__ import annotations

import dataclasses

from mpigrad.solution import Result, Solution

__all__ = ["MinimizeError", "NotFiniteError", "Record", "raise_failure"]


class MinimizeError(RuntimeError):
    """A minimisation failed. The error carries its solution, so that nothing computed is lost.

    Attributes
    ----------
    solution
        The `Solution` at the point that was reached, the same that `throw=False` returns.
    earlier
        The solutions of the earlier runs of a `continuation`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import LBFGS, MinimizeError, minimize
    >>> try:
    ...     minimize(jnp.log, -1.0)
    ... except MinimizeError as error:
    ...     print(error.solution.result.name, error.solution.value)
    NOT_FINITE -1.0
    """

    def __init__(self, text: str, solution: Solution | None = None) -> None:
        super().__init__(text)
        self.solution = solution
        self.earlier: tuple[Solution, ...] = ()


class NotFiniteError(MinimizeError):
    """The loss, or the norm of its gradient, is NaN or infinite."""


def raise_failure(solution: Solution) -> None:
    """Raise the error of a failed run. Return if the run ended as asked or expected."""
    steps, loss = solution.stats["num_steps"], solution.stats["loss"]
    if solution.result is Result.NOT_FINITE and steps == 0:
        raise NotFiniteError(
            "minimize: expected a finite loss and gradient, but the loss of x0 is "
            f"{loss} and the norm of its gradient is {solution.stats['gradient_norm']}. Start from "
            "another x0.",
            solution,
        )
    if solution.result is Result.NOT_FINITE:
        raise NotFiniteError(
            f"minimize: expected a finite loss, but the loss is {loss} after step {steps}. The "
            "error has this point in its solution attribute. Take shorter steps, or use "
            "throw=False.",
            solution,
        )


@dataclasses.dataclass(frozen=True)
class Record:
    """One iteration. Records are the same on all ranks, except for `seconds`.

    The file that `minimize(history=...)` writes has the seconds of rank 0.

    Attributes
    ----------
    iteration
        Index of the iteration. 0 is the first point.
    loss, gradient_norm
        The global loss and the two-norm of its gradient over all unknowns of all ranks.
    step
        The step of the line search. Methods without one give the length of the step.
    evaluations
        Count of values with gradients computed so far.
    seconds
        Time since the start, with the time of earlier runs that were saved.
    """

    iteration: int
    loss: float
    gradient_norm: float
    step: float
    evaluations: int
    seconds: float
