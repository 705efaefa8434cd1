"""Nonlinear conjugate gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpigrad.optimize.line_search import StrongWolfe
from mpigrad.optimize.method import Method
from mpigrad.optimize.objective import Objective, Point
from mpigrad.optimize.unknowns import Unknowns, Vector

__all__ = ["NonlinearCG", "NonlinearCGState"]

_ETA = 0.01  # of Hager and Zhang's lower bound


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NonlinearCGState:
    """The state of `NonlinearCG`: the next direction, its slope and its first trial step."""

    x: Vector
    gradient: Vector
    loss: float
    gradient_norm: float
    step: float
    direction: Vector
    slope: float
    trial: float
    stuck: bool = False


@dataclasses.dataclass(frozen=True)
class NonlinearCG(Method):
    """Nonlinear conjugate gradients. Steps satisfy the strong Wolfe conditions.

    Attributes
    ----------
    formula
        "HZ": Hager and Zhang, SIAM Journal on Optimization 16 (2005), equations 1.3 and 1.6.
        "PR+": the formula of Polak and Ribière, at least zero (Gilbert and Nocedal 1992).
    line_search
        `StrongWolfe(...)`. These directions need more exact steps than L-BFGS.
    first_step
        Two-norm of the first trial step, in the unit of the unknowns. It is longer where rounding
        would hide it.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import NonlinearCG, minimize
    >>> def loss(x):
    ...     return jnp.sum(jnp.arange(1.0, 4.0) * (x - 2) ** 2)
    >>> method = NonlinearCG("PR+")
    >>> solution = minimize(loss, jnp.zeros(3), method, loss="replicated", replicated=True)
    >>> print(solution.value.round(3))
    [2. 2. 2.]
    """

    formula: Literal["HZ", "PR+"] = "HZ"
    line_search: StrongWolfe = StrongWolfe(decrease=1e-4, curvature=0.1)  # noqa: RUF009 (frozen)
    first_step: float = 1.0

    def __post_init__(self) -> None:
        if self.formula not in ("HZ", "PR+"):
            raise ValueError(f'NonlinearCG: formula must be "HZ" or "PR+", got {self.formula!r}')
        if not self.first_step > 0:
            raise ValueError(f"NonlinearCG: first_step must be positive, got {self.first_step}")

    def start(self, objective: Objective, x: Vector) -> NonlinearCGState:
        length = objective.unknowns.visible_step(x, self.first_step)
        return self._along_gradient(objective.evaluate(x), 0.0, length)

    def step(self, objective: Objective, state: NonlinearCGState) -> NonlinearCGState:
        """Do a line search, and a second one along the gradient if the first finds nothing."""
        now = Point(state.x, state.gradient, state.loss, state.gradient_norm, 0.0)
        for at in (state, self._along_gradient(now, 0.0, self.first_step)):
            t, point = self.line_search.search(
                lambda t: objective.evaluate_along(now.x, at.direction, t),  # noqa: B023
                now,
                at.slope,
                at.trial,
            )
            if t > 0:
                break
        else:
            return dataclasses.replace(state, step=0.0, stuck=True)
        program = objective.unknowns.compiled(_products)
        numbers = (float(n) for n in program(now.gradient, point.gradient, at.direction))
        yy, dy, yg, dg, dd = numbers
        if self.formula == "PR+":
            beta = max(0.0, yg / now.norm**2)
        elif dy > 0:
            beta = max(
                (yg - 2 * dg * yy / dy) / dy,
                -1 / (math.sqrt(dd) * min(_ETA, now.norm)),
            )
        else:
            beta = 0.0
        slope = beta * dg - point.norm**2
        if not slope < -1e-10 * point.norm**2:
            return self._along_gradient(point, t, self.first_step)
        return NonlinearCGState(
            point.x,
            point.gradient,
            point.loss,
            point.norm,
            t,
            _conjugate(point.gradient, at.direction, beta),
            slope,
            t * at.slope / slope,
        )

    def layout(self, unknowns: Unknowns) -> Any:
        vector: Any = unknowns.layout()
        no: Any = False
        return NonlinearCGState(vector, vector, no, no, no, vector, no, no, no)

    def _along_gradient(self, point: Point, step: float, length: float) -> NonlinearCGState:
        return NonlinearCGState(
            point.x,
            point.gradient,
            point.loss,
            point.norm,
            step,
            _conjugate(point.gradient, point.gradient, 0.0),
            -(point.norm**2),
            length / max(point.norm, 1e-300),
        )


def _products(unknowns: Unknowns, old: Vector, new: Vector, d: Vector) -> Any:
    y = tuple(b - a for a, b in zip(old, new, strict=True))
    return unknowns.products((y, y), (d, y), (y, new), (d, new), (d, d))


@jax.jit
def _conjugate(gradient: Vector, direction: Vector, beta: Any) -> Vector:
    return tuple(
        jnp.asarray(beta, d.dtype) * d - g for g, d in zip(gradient, direction, strict=True)
    )
