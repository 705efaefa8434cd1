"""The base class of all methods of `minimize`, records of iterations, and errors."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from mpigrad.optimize.objective import Objective
from mpigrad.optimize.unknowns import Unknowns, Vector
from mpigrad.solution import Result, Solution

__all__ = [
    "Method",
    "MinimizeError",
    "NotFiniteError",
    "Record",
    "State",
    "raise_failure",
    "settings_fingerprint",
]

# ---- The record of an iteration, and the errors of `minimize` ----


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


# ---- The base class of all methods of `minimize`: frozen settings that make states from
# states


class State(Protocol):
    """The state of a method: a registered dataclass with all that the next step needs.

    Attributes
    ----------
    x
        The vector of the unknowns. `Unknowns.tree` returns the user's tree.
    loss, gradient_norm
        The loss and the norm of its gradient at x, as Python floats.
    step
        The `step` in the record of the last iteration, or 0.0 before the first.
    stuck
        True if the method found no smaller loss and cannot try anything else.
    """

    @property
    def x(self) -> Vector: ...
    @property
    def loss(self) -> float: ...
    @property
    def gradient_norm(self) -> float: ...
    @property
    def step(self) -> float: ...
    @property
    def stuck(self) -> bool: ...


class Method(abc.ABC):
    """Base class of the methods of `minimize`.

    Subclasses are frozen dataclasses. Their functions are collective, and every decision in them
    uses numbers that are bitwise equal on all ranks, or is taken on rank 0.

    Attributes
    ----------
    residuals
        True if f returns residuals. Half the sum of their squares is minimised.
    stochastic
        True if each step may use another batch.
    """

    residuals: ClassVar[bool] = False
    stochastic: ClassVar[bool] = False

    @property
    def needs_f(self) -> bool:
        """True if the method needs f itself, not only its value and gradient."""
        return False

    def check(self, unknowns: Unknowns) -> None:
        """Raise an error on every rank if this method cannot be used with these unknowns."""
        del unknowns

    @abc.abstractmethod
    def start(self, objective: Objective, x: Vector) -> Any:
        """Return the state at the first point, after one evaluation."""

    @abc.abstractmethod
    def step(self, objective: Objective, state: Any) -> Any:
        """Return the next state. It may reuse the arrays of `state`, which is then invalid."""

    @abc.abstractmethod
    def layout(self, unknowns: Unknowns) -> Any:
        """Return how a state's arrays are distributed over the ranks, for `checkpoint.Store`."""


def settings_fingerprint(settings: Any) -> str:
    """Return settings as a text to compare between ranks.

    Functions and arrays appear as the names of their types only.
    """
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        values = (
            f"{field.name}={settings_fingerprint(getattr(settings, field.name))}"
            for field in dataclasses.fields(settings)
        )
        return f"{type(settings).__name__}({', '.join(values)})"
    if settings is None or isinstance(settings, (bool, int, float, str)):
        return repr(settings)
    if isinstance(settings, Mapping):
        return f"{{{', '.join(f'{k}: {settings_fingerprint(v)}' for k, v in settings.items())}}}"
    if isinstance(settings, (tuple, list)):
        return f"({', '.join(map(settings_fingerprint, settings))})"
    return type(settings).__name__
