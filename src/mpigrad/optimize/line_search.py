"""The line search of Moré and Thuente for the strong Wolfe conditions.

J. J. Moré and D. J. Thuente, Line search algorithms with guaranteed sufficient decrease, ACM
Transactions on Mathematical Software 20 (1994) 286-307. Here φ is the loss along a direction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from mpigrad.optimize.objective import Point

__all__ = ["StrongWolfe"]


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A step t with φ(t) and φ'(t), or the values of the auxiliary function ψ."""

    t: float
    value: float
    slope: float

    def tilted(self, by: float) -> _Trial:
        """Return the same step on the function φ(t) + `by` · t."""
        return _Trial(self.t, self.value + by * self.t, self.slope + by)


@dataclasses.dataclass(frozen=True)
class StrongWolfe:
    """Line search for φ(t) <= φ(0) + decrease t φ'(0) and |φ'(t)| <= curvature |φ'(0)|.

    It is the line search of Moré and Thuente (ACM TOMS 20, 1994).

    Attributes
    ----------
    decrease, curvature
        Constants of the two conditions, 0 < decrease < curvature < 1.
    max_evaluations
        Largest count of values with gradients in one search.
    interval
        Stop if the interval that contains the step is shorter than this fraction of the step.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.optimize import LBFGS, StrongWolfe, minimize
    >>> method = LBFGS(line_search=StrongWolfe(curvature=0.1, max_evaluations=10))
    >>> solution = minimize(lambda x: x**4 - 4 * x, 0.0, method)
    >>> print(solution.value.round(3))
    1.0
    """

    decrease: float = 1e-3
    curvature: float = 0.9
    max_evaluations: int = 20
    interval: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.decrease < self.curvature < 1:
            raise ValueError(
                "StrongWolfe: decrease and curvature must satisfy 0 < decrease < curvature < 1, "
                f"got decrease={self.decrease}, curvature={self.curvature}"
            )
        if self.max_evaluations < 1 or not 0 <= self.interval < 1:
            raise ValueError(
                "StrongWolfe: max_evaluations must be positive and interval in [0, 1), got "
                f"max_evaluations={self.max_evaluations}, interval={self.interval}"
            )

    def search(
        self,
        phi: Callable[[float], Point],
        start: Point,
        slope: float,
        first: float,
        limit: float = math.inf,
    ) -> tuple[float, Point]:
        """Search from the trial step `first`. Return the step t and its point.

        The conditions hold at t. If rounding or `max_evaluations` ends the search before, t is the
        step with the smallest loss. If no loss is smaller than the first, the result is (0.0,
        start). A step with a loss that is not finite is shortened.

        Parameters
        ----------
        phi
            Function of the step that returns its point, with the slope along the direction.
        start, slope
            The point at step 0, and φ'(0) < 0.
        limit
            Largest step, for example to a bound. If the loss decreases enough and still falls
            there, the search ends with it.
        """
        origin = _Trial(0.0, start.loss, slope)
        best, other = (
            origin,
            origin,
        )  # the end of the interval with the smallest loss, and the other
        lowest, lowest_at = start, 0.0
        bracketed, first_stage = False, True
        longest, width, width_before = math.inf, math.inf, math.inf
        tilt = self.decrease * slope
        t = min(first, limit)
        for evaluation in range(self.max_evaluations):
            point = phi(t)
            if not point.finite:
                longest = t
                t = best.t + 0.25 * (t - best.t)
                continue
            here = _Trial(t, point.loss, point.slope)
            if point.loss < lowest.loss:
                lowest, lowest_at = point, t
            enough = here.value <= origin.value + tilt * t
            if enough and abs(here.slope) <= self.curvature * -slope:
                return t, point
            if t == limit and enough and here.slope <= tilt:
                return t, point
            if bracketed and abs(best.t - other.t) <= self.interval * max(best.t, other.t):
                break
            shortest = 0.0 if evaluation == 0 else t + 1.1 * (t - best.t)
            limits = shortest, t + 4 * (t - best.t)
            # Until a step has the sufficient decrease and a non-negative slope, the interval is
            # that of ψ in the paper: the loss minus its sufficient decrease.
            if first_stage and enough and here.slope >= 0:
                first_stage = False
            if first_stage and not enough and here.value <= best.value:
                ends = (trial.tilted(-tilt) for trial in (best, other, here))
                trial, best, other, bracketed = _update(*ends, bracketed, limits)
                best, other = best.tilted(tilt), other.tilted(tilt)
            else:
                trial, best, other, bracketed = _update(best, other, here, bracketed, limits)
            if bracketed:
                # The interval must shrink by a third in two steps.
                if abs(other.t - best.t) >= 0.66 * width_before:
                    trial = best.t + 0.5 * (other.t - best.t)
                width_before, width = width, abs(other.t - best.t)
            if not math.isfinite(trial):  # the values are near overflow
                trial = 0.5 * (best.t + here.t)
            if trial >= longest:
                trial = 0.5 * (best.t + longest)
            trial = min(trial, limit)
            if trial in (best.t, other.t, longest):  # rounding leaves no step between them
                break
            t = trial
        return lowest_at, lowest


def _cubic(a: _Trial, b: _Trial) -> tuple[float, float, float]:
    """Return the minimiser a + r (b - a) of the cubic through two trials, r, and a root in it."""
    theta = 3 * (a.value - b.value) / (b.t - a.t) + a.slope + b.slope
    scale = max(abs(theta), abs(a.slope), abs(b.slope))
    root = scale * math.sqrt(max(0.0, (theta / scale) ** 2 - (a.slope / scale) * (b.slope / scale)))
    root = math.copysign(root, b.t - a.t)
    denominator = 2 * root - a.slope + b.slope
    r = (root - a.slope + theta) / denominator if denominator else 0.5
    return a.t + r * (b.t - a.t), r, root


def _secant(a: _Trial, b: _Trial) -> float:
    """Return the point of zero slope of the parabola through two slopes."""
    return a.t + a.slope / (a.slope - b.slope) * (b.t - a.t)


def _update(
    best: _Trial, other: _Trial, here: _Trial, bracketed: bool, limits: tuple[float, float]
) -> tuple[float, _Trial, _Trial, bool]:
    """Return the next trial step and the interval after the present one (section 4)."""
    opposite = here.slope * math.copysign(1.0, best.slope) < 0
    if here.value > best.value:  # case 1
        cubic, *_ = _cubic(best, here)
        rise = (best.value - here.value) / (here.t - best.t)
        parabola = best.t + 0.5 * best.slope / (rise + best.slope) * (here.t - best.t)
        nearer = abs(cubic - best.t) < abs(parabola - best.t)
        return (cubic if nearer else 0.5 * (cubic + parabola)), best, here, True
    if opposite:  # case 2
        cubic, *_ = _cubic(here, best)
        secant = _secant(here, best)
        farther = abs(cubic - here.t) > abs(secant - here.t)
        return (cubic if farther else secant), here, best, True
    low, high = limits
    if abs(here.slope) < abs(best.slope):  # case 3
        cubic, r, root = _cubic(here, best)
        if not (r < 0 and root != 0):
            cubic = high if here.t > best.t else low
        secant = _secant(here, best)
        nearer = abs(cubic - here.t) < abs(secant - here.t)
        trial = cubic if nearer == bracketed else secant
        if bracketed:
            limit = here.t + 0.66 * (other.t - here.t)
            trial = min(limit, trial) if here.t > best.t else max(limit, trial)
        else:
            trial = max(low, min(high, trial))
    elif bracketed:  # case 4
        trial, *_ = _cubic(here, other)
    else:
        trial = high if here.t > best.t else low
    return trial, here, other, bracketed
