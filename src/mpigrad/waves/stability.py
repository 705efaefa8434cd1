"""The largest stable time step, and the refusal of a larger one."""

from __future__ import annotations

import math
from typing import Any

from mpigrad.grid.grid import Grid

__all__ = ["SECOND_DERIVATIVES", "limiting_square", "wave_equation_limit"]

# Coefficients of the second derivative by its order: of the cell itself, one and two cells away.
SECOND_DERIVATIVES = {2: (-2.0, 1.0), 4: (-5 / 2, 4 / 3, -1 / 12)}


def wave_equation_limit(grid: Grid, order: int) -> float:
    """The largest stable step of u_tt = v^2 (u_xx + u_yy) by leapfrog, times v, in length.

    2 / sqrt(sum of k / h^2 over the axes), where -k / h^2 is the lowest eigenvalue of the second
    derivative: k = 4 at order 2, 16/3 at order 4.
    """
    center, *others = SECOND_DERIVATIVES[order]
    k = -center - 2 * sum(c * (-1) ** (i + 1) for i, c in enumerate(others))
    return 2 / math.sqrt(k * sum(1 / h**2 for h in grid.spacing))


def limiting_square(square: Any, lightest: Any, stiffest: Any) -> Any:
    """The square of the velocity that limits the time step of elastic waves, (m/s)^2.

    `square` is the largest of (lambda + 2 mu) / rho, `lightest` the smallest rho and `stiffest` the
    largest lambda + 2 mu. A part 1/28 of each difference comes from two cells away: light cells
    feel stiff ones through its square.
    """
    beyond = stiffest / lightest - square  # 0 in a homogeneous medium
    return square + beyond / 28**2
