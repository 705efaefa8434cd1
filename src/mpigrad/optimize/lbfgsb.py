"""Limited-memory BFGS within bounds, with vectors that are distributed over the ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from mpigrad.optimize.bounds import (
    Limits,
    Trial,
    check_bounds,
    check_pair,
    clip,
    last_breakpoint,
    model_path,
    model_restriction,
    projected_norm,
    trial_direction,
    vectors_of_bounds,
)
from mpigrad.optimize.lbfgs import empty, remember_pair
from mpigrad.optimize.line_search import StrongWolfe
from mpigrad.optimize.method import Method
from mpigrad.optimize.objective import Objective, Point
from mpigrad.optimize.unknowns import Unknowns, Vector

__all__ = ["LBFGSB", "LBFGSBState"]

_SECTIONS = 8  # steps of the path that are looked at in one message


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LBFGSBState:
    """The state of L-BFGS-B.

    Attributes
    ----------
    gradient_norm
        The two-norm of the projected gradient: the longest step along the negative gradient, at
        most as long as the gradient, that stays within the bounds.
    pairs
        A vector whose arrays have shape (2 memory, ...): first the steps s, then the changes y of
        the gradient. Each half is a ring of rows.
    gram
        Inner products of all rows, of shape (2 memory, 2 memory).
    count
        Count of pairs stored so far, including those that were overwritten.
    """

    x: Vector
    gradient: Vector
    loss: float
    gradient_norm: float
    step: float
    pairs: Vector
    gram: NDArray[np.float64]
    count: int
    stuck: bool = False


@dataclasses.dataclass(frozen=True)
class LBFGSB(Method):
    """L-BFGS-B (Byrd, Lu, Nocedal and Zhu 1995) with distributed vectors.

    A step goes to the generalised Cauchy point of a quadratic model, and from there to the
    minimiser over the unknowns that are not at a bound, which is projected onto the bounds (Morales
    and Nocedal 2011). Then a line search satisfies the strong Wolfe conditions, or stops at a
    bound. Nothing is gathered: reductions of small arrays find the Cauchy point. All points at
    which the function is evaluated are within the bounds. A start outside them is moved onto them.

    Attributes
    ----------
    bounds
        None, or (lower, upper). Each is None, a float, or a pytree prefix of the unknowns with
        floats and arrays that broadcast to the leaves (of sharded leaves, to this rank's part).
        Infinite values mean no bound.
    memory
        Count of stored pairs. They take 2·memory vectors, which are distributed over the ranks.
    line_search
        `StrongWolfe(...)`.
    first_step
        Two-norm of the first trial step, in the unit of the unknowns, if no bound is in its way,
        and of the first trial step after a search that found no smaller loss. It is longer where
        rounding would hide it.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import LBFGSB, minimize
    >>> def loss(x):
    ...     return jnp.sum((x["a"] - 2.0) ** 2) + (x["b"] + 1.0) ** 2
    >>> start = {"a": jnp.zeros(2), "b": jnp.zeros(())}
    >>> method = LBFGSB(bounds=({"a": -jnp.inf, "b": 0.0}, {"a": jnp.array([1.0, 3.0]), "b": 9.0}))
    >>> solution = minimize(loss, start, method, loss="replicated", replicated=True)
    >>> print(solution.value["a"].round(3), solution.value["b"])
    [1. 2.] 0.0
    """

    bounds: tuple[Any, Any] | None = None
    memory: int = 10
    line_search: StrongWolfe = StrongWolfe()  # noqa: RUF009 (frozen)
    first_step: float = 1.0

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError(f"LBFGSB: memory must be positive, got {self.memory}")
        if not self.first_step > 0:
            raise ValueError(f"LBFGSB: first_step must be positive, got {self.first_step}")
        check_pair(self.bounds, "LBFGSB")

    def check(self, unknowns: Unknowns) -> None:
        check_bounds(unknowns, self.bounds, "LBFGSB")

    def start(self, objective: Objective, x: Vector) -> LBFGSBState:
        limits = self._limits(objective)
        point = objective.evaluate(clip(x, limits))
        norm = projected_norm(objective.unknowns, point.x, point.gradient, limits)
        m = self.memory
        return LBFGSBState(
            point.x, point.gradient, point.loss, norm, 0.0, empty(x, 2 * m),
            np.zeros((2 * m, 2 * m)), count=0,
        )  # fmt: skip

    def step(self, objective: Objective, state: LBFGSBState) -> LBFGSBState:
        """Do a line search, and one with an empty memory if the first finds nothing."""
        unknowns, limits, m = objective.unknowns, self._limits(objective), self.memory
        now = Point(state.x, state.gradient, state.loss, state.gradient_norm, 0.0)
        while True:
            trial = self._trial(unknowns, state, limits)
            if trial is not None:
                direction = trial.direction
                t, point = self.line_search.search(
                    lambda t: objective.evaluate_along(now.x, direction, t, limits),  # noqa: B023
                    now,
                    trial.slope,
                    1.0,
                    trial.longest,
                )
                if t > 0:
                    break
            if state.count == 0:
                return dataclasses.replace(state, step=0.0, stuck=True)
            state = dataclasses.replace(state, count=0)
        norm = projected_norm(unknowns, point.x, point.gradient, limits)
        pairs, gram, count = state.pairs, state.gram, state.count
        # Without curvature s·y along the step, which may have stopped at a bound, the pair is
        # useless.
        if t * (point.slope - trial.slope) > unknowns.epsilon * t * -trial.slope:
            slot = count % m
            pairs, products = remember_pair(
                unknowns, pairs, slot, trial.direction, t, now.gradient, point.gradient
            )
            gram = gram.copy()
            for row, values in zip((slot, m + slot), products, strict=True):
                gram[row, :] = gram[:, row] = values
            count += 1
        return LBFGSBState(point.x, point.gradient, point.loss, norm, t, pairs, gram, count)

    def layout(self, unknowns: Unknowns) -> Any:
        vector, pairs = unknowns.layout(), unknowns.layout(leading=1)
        return LBFGSBState(vector, vector, False, False, False, pairs, False, False, False)  # type: ignore[arg-type]

    def _limits(self, objective: Objective) -> Limits:
        limits = getattr(objective, "method_data", None)
        if limits is None:
            limits = vectors_of_bounds(objective.unknowns, self.bounds, "LBFGSB")
            objective.method_data = limits
        return limits  # type: ignore[no-any-return]

    def _trial(self, unknowns: Unknowns, state: LBFGSBState, limits: Limits) -> Trial | None:
        """Return the search direction, or None if the model gives no descent."""
        at = (unknowns, state.pairs, state.x, state.gradient, limits)
        if state.count == 0:
            # Without memory the model is a multiple of the identity, and the Cauchy point is its
            # minimiser.
            theta = state.gradient_norm / unknowns.visible_step(state.x, self.first_step)
            trial = trial_direction(*at, 1 / theta, theta, np.zeros(2 * self.memory))
            return trial if trial.slope < 0 else None
        try:
            theta, K = _curvature(state)
            t = _cauchy_point(*at, theta, K)
            near = model_restriction(*at, t)
            Kc = K @ near.of_all_z
            of_r = -(near.of_g + theta * near.of_z - near.gram @ Kc)
            v = np.linalg.solve(np.eye(len(K)) - K @ near.gram / theta, K @ of_r)
        except np.linalg.LinAlgError:
            return None
        coefficients = Kc / theta + v / theta**2
        if not (math.isfinite(t) and np.all(np.isfinite(coefficients))):
            return None
        trial = trial_direction(*at, t, theta, coefficients)
        if not trial.slope < 0:
            trial = trial_direction(*at, t, theta, coefficients, trial.fraction)
        return trial if trial.slope < 0 else None


def _curvature(state: LBFGSBState) -> tuple[float, NDArray[np.float64]]:
    """Return θ and K of the model Hessian θ I - Rᵀ K R (Byrd et al. 1995, equation 3.2)."""
    m = len(state.gram) // 2
    pairs = min(state.count, m)
    ring = (np.arange(pairs) + (state.count - pairs)) % m  # from the oldest to the newest
    SS, SY = state.gram[np.ix_(ring, ring)], state.gram[np.ix_(ring, m + ring)]
    newest = ring[-1]
    theta = state.gram[m + newest, m + newest] / SY[-1, -1]
    L = np.tril(SY, -1)
    middle = np.block([[-np.diag(np.diag(SY)), L.T], [L, theta * SS]])
    unit = np.concatenate([np.ones(pairs), np.full(pairs, theta)])  # the rows are y and θ s
    inverse = np.linalg.inv(middle) * unit * unit[:, None]
    K = np.zeros_like(state.gram)
    rows = np.concatenate([m + ring, ring])
    K[np.ix_(rows, rows)] = (inverse + inverse.T) / 2
    return float(theta), K


def _cauchy_point(
    unknowns: Unknowns,
    rows: Vector,
    x: Vector,
    g: Vector,
    limits: Limits,
    theta: float,
    K: NDArray[np.float64],
) -> float:
    """Return the step of the path at which the model has a local minimum (collective).

    The derivative of the model along the path is linear between breakpoints. It is negative at the
    lower end of the interval, and not at the upper end.
    """
    high, times = math.inf, np.zeros(1)
    while True:
        path = model_path(unknowns, rows, x, g, limits, times)
        falls = (theta * times - 1) * path.moving - _products(path.of_d, K, path.of_z)
        bends = theta * path.moving - _products(path.of_d, K, path.of_d)
        rising = np.flatnonzero(falls >= 0)
        if len(rising):
            high = float(times[rising[0]])
            if rising[0] == 0:  # the derivative changes its sign at this breakpoint
                return high
        last = rising[0] - 1 if len(rising) else len(times) - 1
        after = float(path.next[last])
        least = times[last] - falls[last] / bends[last] if bends[last] > 0 else math.inf
        if least <= after:
            return float(least)
        if after >= high:
            return high
        if math.isinf(high):
            end = last_breakpoint(unknowns, x, g, limits)
            times = _between(after, max(after, end), _SECTIONS)
        else:
            times = _between(after, high, _SECTIONS + 1)[:-1]


def _products(a: NDArray[Any], K: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    return np.einsum("ki,ij,kj->k", a, K, b)


def _between(low: float, high: float, count: int) -> NDArray[np.float64]:
    """Return steps from low to high whose ratios are equal, both ends exact."""
    steps = np.clip(np.geomspace(low, high, count), low, high)
    steps[0], steps[-1] = low, high
    return steps
