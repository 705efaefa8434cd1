"""The base class of all methods of `minimize`: frozen settings that make states from states."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from mpigrad.optimize.objective import Objective
from mpigrad.optimize.unknowns import Unknowns, Vector

__all__ = ["Method", "State", "settings_fingerprint"]


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
