"""What every method of `minimize` is: frozen settings that make states from states."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from mpigrad.optimize.objective import Objective
from mpigrad.optimize.unknowns import Unknowns, Vector

__all__ = ["Method", "State", "told"]


class State(Protocol):
    """Where a method is: a registered dataclass, all that it needs to go on.

    Attributes
    ----------
    x
        The vector of the unknowns (`Unknowns.tree` makes the user's tree of it).
    loss, gradient_norm
        There; numbers of Python.
    step
        What the record of the last iteration calls its step; 0.0 before the first.
    stuck
        The method has found no smaller loss, and has nothing else to try.
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
    """A way to minimise.

    Subclasses are frozen dataclasses. Their methods are collective, and every decision in them is
    made of numbers that are equal on all ranks bit for bit, or is rank 0's.

    Attributes
    ----------
    residuals
        Whether f returns residuals, of which half the sum of squares is minimised.
    stochastic
        Whether each step may see another batch.
    """

    residuals: ClassVar[bool] = False
    stochastic: ClassVar[bool] = False

    @property
    def needs_f(self) -> bool:
        """Whether it takes more of f than its value and gradient."""
        return False

    def check(self, unknowns: Unknowns) -> None:
        """Raise, on every rank alike, if this method is not for such unknowns."""
        del unknowns

    @abc.abstractmethod
    def start(self, objective: Objective, x: Vector) -> Any:
        """The state at the first point: one evaluation."""

    @abc.abstractmethod
    def step(self, objective: Objective, state: Any) -> Any:
        """The next state. It may take over the arrays of the one before, which is then lost."""

    @abc.abstractmethod
    def layout(self, unknowns: Unknowns) -> Any:
        """How a state's arrays are shared out over the ranks, for `checkpoint.Store`."""


def told(setting: Any) -> str:
    """A method and its settings as a text, functions and arrays by their types alone."""
    if dataclasses.is_dataclass(setting) and not isinstance(setting, type):
        inner = (f"{f.name}={told(getattr(setting, f.name))}" for f in dataclasses.fields(setting))
        return f"{type(setting).__name__}({', '.join(inner)})"
    if setting is None or isinstance(setting, (bool, int, float, str)):
        return repr(setting)
    if isinstance(setting, Mapping):
        return f"{{{', '.join(f'{k}: {told(v)}' for k, v in setting.items())}}}"
    if isinstance(setting, (tuple, list)):
        return f"({', '.join(map(told, setting))})"
    return type(setting).__name__
