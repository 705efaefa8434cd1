"""The largest stable time step, and the refusal of a larger one."""

from __future__ import annotations

import math

from mpigrad.grid import Grid

__all__ = ["SECOND_DERIVATIVES", "wave_equation_limit"]

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
