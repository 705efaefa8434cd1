"""Limited-memory BFGS whose vectors are shared out over the ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from mpigrad.optimize.lbfgs_memory import combine, empty, remember
from mpigrad.optimize.line_search import StrongWolfe
from mpigrad.optimize.method import Method
from mpigrad.optimize.objective import Objective, Point
from mpigrad.optimize.unknowns import Unknowns, Vector

__all__ = ["LBFGS", "LBFGSState"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LBFGSState:
    """Where L-BFGS is.

    Attributes
    ----------
    pairs
        A vector of shape (2 memory, ...) in each of its arrays: steps s, then the changes y of the
        gradient, each in the rows of a ring.
    gram
        sᵢ·yⱼ and yᵢ·yⱼ, shape (2 memory, memory).
    products
        Inner products of all rows with the gradient, shape (2 memory,).
    count
        Pairs remembered so far, the ones that were overwritten included.
    """

    x: Vector
    gradient: Vector
    loss: float
    gradient_norm: float
    step: float
    pairs: Vector
    gram: NDArray[np.float64]
    products: NDArray[np.float64]
    count: int
    stuck: bool = False


@dataclasses.dataclass(frozen=True)
class LBFGS(Method):
    """Limited-memory BFGS (Liu and Nocedal 1989), its steps by the strong Wolfe conditions.

    The direction is a combination of the gradient and the 2·memory remembered vectors. Its
    coefficients are made of their inner products alone, in the compact form (Byrd, Nocedal and
    Schnabel, Mathematical Programming 63 (1994), equation 3.1): an iteration outside the objective
    reads the memory for inner products (with the new gradient and with its change), which one
    message sums over the ranks, and once for the combination.

    Attributes
    ----------
    memory
        Number of pairs that are remembered. They take 2·memory vectors, shared out over the ranks.
    line_search
        `StrongWolfe(...)`.
    first_step
        Two-norm of the first trial step, in the unit of the unknowns (and of the first after a
        search that found nothing); later ones are quasi-Newton steps.
    """

    memory: int = 10
    line_search: StrongWolfe = StrongWolfe()  # noqa: RUF009 (frozen)
    first_step: float = 1.0

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError(f"LBFGS: memory={self.memory} must be positive")
        if not self.first_step > 0:
            raise ValueError(f"LBFGS: first_step={self.first_step} must be positive")

    def start(self, objective: Objective, x: Vector) -> LBFGSState:
        return self._forgetful(objective.first(x), 0.0, None)

    def step(self, objective: Objective, state: LBFGSState) -> LBFGSState:
        """One line search; a second one along the gradient where the memory leads nowhere."""
        now = Point(state.x, state.gradient, state.loss, state.gradient_norm, 0.0)
        coefficients, slope = _quasi_newton(state)
        if not slope < 0:  # rounding has spoiled the memory
            state = self._forgetful(now, state.step, state.pairs)
            coefficients, slope = _quasi_newton(state)
        while True:
            fresh = state.count == 0
            direction = combine(state.pairs, coefficients[:-1], now.gradient, coefficients[-1])
            t, point = self.line_search.search(
                lambda t: objective.along(now.x, direction, t),  # noqa: B023
                now,
                slope,
                self.first_step / now.norm if fresh else 1.0,
            )
            if t > 0 or fresh:
                break
            state = self._forgetful(now, state.step, state.pairs)
            coefficients, slope = _quasi_newton(state)
        if t == 0:
            return dataclasses.replace(state, step=0.0, stuck=True)
        slot = state.count % self.memory
        pairs, numbers = remember(
            objective.unknowns, state.pairs, slot, direction, t, now.gradient, point.gradient
        )
        gram, m = state.gram.copy(), self.memory
        if not numbers[0, slot] > objective.unknowns.epsilon * t * -slope:  # no curvature s·y
            return self._forgetful(point, t, pairs)
        gram[:, slot] = numbers[0]
        gram[m + slot, :] = numbers[0, m:]
        return LBFGSState(
            point.x, point.gradient, point.loss, point.norm, t, pairs, gram, numbers[1],
            state.count + 1,
        )  # fmt: skip

    def layout(self, unknowns: Unknowns) -> Any:
        vector, pairs = unknowns.layout(), unknowns.layout(leading=1)
        return LBFGSState(vector, vector, False, False, False, pairs, False, False, False, False)  # type: ignore[arg-type]

    def _forgetful(self, point: Point, step: float, pairs: Vector | None) -> LBFGSState:
        """A state without memory, so that the next direction is the gradient's."""
        m = self.memory
        if pairs is None:
            pairs = empty(point.x, 2 * m)
        nothing = np.zeros((2 * m, m)), np.zeros(2 * m)
        return LBFGSState(
            point.x, point.gradient, point.loss, point.norm, step, pairs, *nothing, count=0
        )


def _quasi_newton(state: LBFGSState) -> tuple[NDArray[np.float64], float]:
    """Coefficients of (s..., y..., gradient) in the direction -H g, and its product with g."""
    m = state.gram.shape[1]
    known = min(state.count, m)
    coefficients = np.zeros(2 * m + 1)
    if known == 0:
        coefficients[-1] = -1.0
        return coefficients, -(state.gradient_norm**2)
    ring = (np.arange(known) + (state.count - known)) % m  # from the oldest to the newest
    SY, YY = state.gram[ring][:, ring], state.gram[m + ring][:, ring]
    Sg, Yg = state.products[ring], state.products[m + ring]
    scale = SY[-1, -1] / YY[-1, -1]
    inverse = np.linalg.inv(np.triu(SY))
    u = inverse @ Sg
    p = inverse.T @ (np.diag(SY) * u + scale * (YY @ u - Yg))
    coefficients[ring], coefficients[m + ring], coefficients[-1] = -p, scale * u, -scale
    slope = float(
        coefficients[ring] @ Sg + coefficients[m + ring] @ Yg - scale * state.gradient_norm**2
    )
    return coefficients, slope
