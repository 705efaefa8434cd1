"""The line search of Moré and Thuente, for the strong Wolfe conditions.

J. J. Moré and D. J. Thuente, Line search algorithms with guaranteed sufficient decrease, ACM
Transactions on Mathematical Software 20 (1994) 286-307. Their φ is the loss along a direction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from mpigrad.optimize.objective import Point

__all__ = ["StrongWolfe"]


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A step, φ and φ' there (or those of the auxiliary function)."""

    t: float
    value: float
    slope: float

    def tilted(self, by: float) -> _Trial:
        """The same step on the function plus `by` times the step."""
        return _Trial(self.t, self.value + by * self.t, self.slope + by)


@dataclasses.dataclass(frozen=True)
class StrongWolfe:
    """Steps t with φ(t) <= φ(0) + decrease t φ'(0) and |φ'(t)| <= curvature |φ'(0)|.

    Attributes
    ----------
    decrease, curvature
        0 < decrease < curvature < 1.
    evaluations
        Most values with gradients in one search.
    interval
        Stop where the step is known up to this part of itself.
    """

    decrease: float = 1e-3
    curvature: float = 0.9
    evaluations: int = 20
    interval: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.decrease < self.curvature < 1:
            raise ValueError(
                f"StrongWolfe: decrease={self.decrease} and curvature={self.curvature}; they must "
                "satisfy 0 < decrease < curvature < 1"
            )
        if self.evaluations < 1 or not 0 <= self.interval < 1:
            raise ValueError(
                f"StrongWolfe: evaluations={self.evaluations} must be positive, "
                f"interval={self.interval} in [0, 1)"
            )

    def search(
        self, phi: Callable[[float], Point], start: Point, slope: float, first: float
    ) -> tuple[float, Point]:
        """(t, the point there), from the trial step `first`; (0.0, start) where there is none.

        A step at which the conditions hold or, where rounding or the number of evaluations ends the
        search before, the one of smallest loss, if that is smaller than the first. Where the loss
        is not finite, steps are shortened.

        Parameters
        ----------
        phi
            Step -> the point there, with its slope along the direction.
        start, slope
            The point at step 0, and φ'(0) < 0.
        """
        origin = _Trial(0.0, start.loss, slope)
        best, other = origin, origin  # where the loss is smallest; the interval's other end
        lowest, lowest_at = start, 0.0
        bracketed, first_stage = False, True
        longest, width, width_before = math.inf, math.inf, math.inf
        tilt = self.decrease * slope
        t = first
        for evaluation in range(self.evaluations):
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
            if bracketed and abs(best.t - other.t) <= self.interval * max(best.t, other.t):
                break
            shortest = 0.0 if evaluation == 0 else t + 1.1 * (t - best.t)
            limits = shortest, t + 4 * (t - best.t)
            # Until a step has the decrease and a non-negative slope, the interval is that of the
            # loss less its sufficient decrease (ψ in the paper).
            if first_stage and enough and here.slope >= 0:
                first_stage = False
            if first_stage and not enough and here.value <= best.value:
                ends = (trial.tilted(-tilt) for trial in (best, other, here))
                trial, best, other, bracketed = _update(*ends, bracketed, limits)
                best, other = best.tilted(tilt), other.tilted(tilt)
            else:
                trial, best, other, bracketed = _update(best, other, here, bracketed, limits)
            if bracketed:
                # The interval has to shrink by a third in two steps.
                if abs(other.t - best.t) >= 0.66 * width_before:
                    trial = best.t + 0.5 * (other.t - best.t)
                width_before, width = width, abs(other.t - best.t)
            if not math.isfinite(trial):  # of values near overflow
                trial = 0.5 * (best.t + here.t)
            if trial >= longest:
                trial = 0.5 * (best.t + longest)
            if trial in (best.t, other.t, longest):  # rounding allows no step between them
                break
            t = trial
        return lowest_at, lowest


def _cubic(a: _Trial, b: _Trial) -> tuple[float, float, float]:
    """The minimiser a + r (b - a) of the cubic through two values and slopes; r; a root in it."""
    theta = 3 * (a.value - b.value) / (b.t - a.t) + a.slope + b.slope
    scale = max(abs(theta), abs(a.slope), abs(b.slope))
    root = scale * math.sqrt(max(0.0, (theta / scale) ** 2 - (a.slope / scale) * (b.slope / scale)))
    root = math.copysign(root, b.t - a.t)
    denominator = 2 * root - a.slope + b.slope
    r = (root - a.slope + theta) / denominator if denominator else 0.5
    return a.t + r * (b.t - a.t), r, root


def _secant(a: _Trial, b: _Trial) -> float:
    """Where the slope is zero of the parabola through two slopes."""
    return a.t + a.slope / (a.slope - b.slope) * (b.t - a.t)


def _update(
    best: _Trial, other: _Trial, here: _Trial, bracketed: bool, limits: tuple[float, float]
) -> tuple[float, _Trial, _Trial, bool]:
    """The next trial step, and the interval that the present one leaves (section 4)."""
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
