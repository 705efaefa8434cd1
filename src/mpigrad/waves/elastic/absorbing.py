"""The coefficients of convolutional perfectly matched layers (C-PML) on a rank's wave tile."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from mpigrad._shapes import Float

__all__ = ["Layer", "layer"]

POWER = 2  # of the damping's growth with depth


@dataclasses.dataclass(frozen=True)
class Layer:
    """Coefficients of a derivative along one axis in the layers on both sides of a wave tile.

    A derivative g is replaced by g + psi in the first `before` and the last `after` cells along the
    axis. The memory psi is updated in each step: psi <- b psi + a g. The rows of `a` and `b` hold
    the values at the cell centres and at the half points. Their columns are these cells, first
    those of the first side.
    """

    before: int
    after: int
    a: Float[np.ndarray, "2 cells"]
    b: Float[np.ndarray, "2 cells"]


def layer(
    before: int,
    after: int,
    spacing: float,
    dt: float,
    velocity: float,
    frequency: float,
    reflection: float,
    stagger: int = 1,
) -> Layer:
    """Return the layers of `before` and `after` cells on the two sides of a wave tile.

    A width of 0 means no layer. At depth x in a layer of thickness L: d = d0 (x/L)^2 with
    d0 = -3 velocity ln(reflection) / 2L,
    alpha = pi frequency (1 - x/L), kappa = 1, b = exp(-(d + alpha) dt), a = d (b - 1) / (d + alpha)
    (Komatitsch and Martin, "An unsplit convolutional perfectly matched layer improved at grazing
    incidence for the seismic wave equation", Geophysics 72, 2007).

    Parameters
    ----------
    spacing
        Size of a cell along the axis, in m.
    velocity
        Velocity of the fastest wave, in m/s.
    frequency
        Frequency of the source, in Hz.
    reflection
        Theoretical reflection of a wave that enters at a right angle.
    stagger
        1 if the half points lie further than the cell centres, -1 if they lie before them.
    """

    def side(cells: int, outwards: int) -> tuple[np.ndarray, np.ndarray]:
        # Depth of the cell centres and of the half points, over the thickness.
        centers = np.arange(cells) + 0.5
        halves = centers + 0.5 * outwards * stagger
        depth = np.maximum(np.stack([centers, halves])[:, ::outwards], 0) / max(cells, 1)
        strongest = -(POWER + 1) * velocity * math.log(reflection) / (2 * max(cells, 1) * spacing)
        d, alpha = strongest * depth**POWER, math.pi * frequency * (1 - depth)
        b = np.exp(-(d + alpha) * dt)
        return np.where(depth > 0, d * (b - 1) / np.where(depth > 0, d + alpha, 1), 0.0), b

    sides = [side(before, -1), side(after, 1)]
    a, b = (np.concatenate([part[k] for part in sides], axis=1) for k in range(2))
    return Layer(before, after, a, b)
