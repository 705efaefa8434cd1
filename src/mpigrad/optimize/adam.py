"""Adam, for objectives that use another sample in each step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpigrad.optimize.method import Method
from mpigrad.optimize.objective import Objective
from mpigrad.optimize.unknowns import Unknowns, Vector

__all__ = ["Adam", "AdamState"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdamState:
    """The state of Adam: means of the gradient and of its square, and the count of steps."""

    stuck: ClassVar[bool] = False

    x: Vector
    gradient: Vector
    loss: float
    gradient_norm: float
    step: float
    mean: Vector
    square: Vector
    count: int


@dataclasses.dataclass(frozen=True)
class Adam(Method):
    """Adam (Kingma and Ba, ICLR 2015), without optax. A record's `step` is the learning rate.

    Attributes
    ----------
    learning_rate
        A float, or a Python function of the index of the step (from 1), the same on all ranks.
    mean, square
        Decay rates of the means of the gradient and of its square (β₁ and β₂).
    epsilon
        Added to the root of the mean square.
    clip
        Gradients with a larger two-norm, over all unknowns of all ranks, are scaled to this norm.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import Adam, minimize
    >>> def loss(x):
    ...     return jnp.sum((x - 2.0) ** 2)
    >>> method = Adam(0.1)
    >>> settings = {"max_steps": 500, "loss": "replicated", "replicated": True}
    >>> solution = minimize(loss, jnp.zeros(2), method, **settings)
    >>> print(solution.value.round(2))
    [2. 2.]
    """

    stochastic: ClassVar[bool] = True

    learning_rate: float | Callable[[int], float] = 1e-3
    mean: float = 0.9
    square: float = 0.999
    epsilon: float = 1e-8
    clip: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.mean < 1 and 0 <= self.square < 1):
            raise ValueError(
                "Adam: mean and square must be in [0, 1), got "
                f"mean={self.mean}, square={self.square}"
            )
        if not (callable(self.learning_rate) or self.learning_rate > 0):
            raise ValueError(f"Adam: learning_rate must be positive, got {self.learning_rate}")
        if not self.epsilon > 0 or not (self.clip is None or self.clip > 0):
            raise ValueError(
                f"Adam: epsilon and clip must be positive, got epsilon={self.epsilon}, "
                f"clip={self.clip}"
            )

    def start(self, objective: Objective, x: Vector) -> AdamState:
        point = objective.evaluate(x)
        limit = math.sqrt(min((float(jnp.finfo(leaf.dtype).max) for leaf in x), default=math.inf))
        if limit <= point.norm < math.inf:
            raise ValueError(
                f"minimize: at x0 the norm of the gradient is {point.norm:.0e}, and Adam's means "
                f"of squares would overflow. Divide f by a number near {point.norm:.0e}."
            )
        mean, square = (jax.tree.map(jnp.zeros_like, x) for _ in range(2))
        return AdamState(
            point.x, point.gradient, point.loss, point.norm, 0.0, mean, square, count=0
        )

    def step(self, objective: Objective, state: AdamState) -> AdamState:
        count = state.count + 1
        rate = self.learning_rate
        rate = float(rate(count) if callable(rate) else rate)
        clipped = self.clip is not None and state.gradient_norm > self.clip
        factors = (
            self.clip / state.gradient_norm if self.clip is not None and clipped else 1.0,
            self.mean,
            self.square,
            rate / (1 - self.mean**count),
            1 / math.sqrt(1 - self.square**count),
            self.epsilon,
        )
        direction, mean, square = _update(state.mean, state.square, state.gradient, factors)
        point = objective.evaluate_along(state.x, direction, 1.0)
        return AdamState(point.x, point.gradient, point.loss, point.norm, rate, mean, square, count)

    def layout(self, unknowns: Unknowns) -> Any:
        vector: Any = unknowns.layout()
        no: Any = False
        return AdamState(vector, vector, no, no, no, vector, vector, no)


@jax.jit
def _update(mean: Vector, square: Vector, gradient: Vector, factors: Any) -> tuple[Vector, ...]:
    def one(m: Any, v: Any, g: Any) -> tuple[Any, Any, Any]:
        scale, b1, b2, rate, root, epsilon = (jnp.asarray(factor, g.dtype) for factor in factors)
        g = scale * g
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        return -rate * m / (root * jnp.sqrt(v) + epsilon), m, v

    parts = [one(m, v, g) for m, v, g in zip(mean, square, gradient, strict=True)]
    direction, mean, square = zip(*parts, strict=True)
    return direction, mean, square
