"""The largest stable time steps of the schemes."""

from __future__ import annotations

import math
from typing import Any

from mpigrad.grid.grid import Grid

__all__ = ["SECOND_DERIVATIVES", "limiting_square", "staggered_limit", "wave_equation_limit"]

# Coefficients of the second derivative by order: for the cell itself, one and more cells away.
SECOND_DERIVATIVES = {
    2: (-2.0, 1.0),
    4: (-5 / 2, 4 / 3, -1 / 12),
    8: (-205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560),
}


def wave_equation_limit(grid: Grid, order: int) -> float:
    """Return the largest stable leapfrog step of u_tt = v^2 (u_xx + u_yy), times v (a length).

    It is 2 / sqrt(sum of k / h^2 over the axes). The lowest eigenvalue of the second derivative is
    -k / h^2 with k = 4 at order 2, 16/3 at order 4 and 2048/315 at
    order 8.
    """
    center, *others = SECOND_DERIVATIVES[order]
    k = -center - 2 * sum(c * (-1) ** (i + 1) for i, c in enumerate(others))
    return 2 / math.sqrt(k * sum(1 / h**2 for h in grid.spacing))


def staggered_limit(grid: Grid, surface_axis: int | None = None) -> float:
    """Return the largest stable step of the elastic scheme, times the limiting velocity (a length).

    It is (6/7) / sqrt(sum of 1 / h^2 over the axes). The differences at a free surface
    (`elastic.free_surface`) have a norm of 2.34289 / h instead of (7/3) / h along its axis.
    """
    norms = [2.34289 * 6 / 14 if axis == surface_axis else 1.0 for axis in range(grid.ndim)]
    squares = sum((norm / h) ** 2 for norm, h in zip(norms, grid.spacing, strict=True))
    return 24 / (28 * math.sqrt(squares))


def limiting_square(square: Any, lightest: Any, stiffest: Any) -> Any:
    """Return the square of the velocity that limits the time step of elastic waves, (m/s)^2.

    A fraction 1/28 of each difference comes from two cells away. Its square couples light cells
    to stiff cells.

    Parameters
    ----------
    square
        The largest (lambda + 2 mu) / rho.
    lightest
        The smallest rho.
    stiffest
        The largest lambda + 2 mu.
    """
    beyond = stiffest / lightest - square  # 0 in a homogeneous medium
    return square + beyond / 28**2
