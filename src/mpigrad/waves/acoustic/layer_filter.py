"""The filters of convolutional absorbing layers, which acoustic waves on three axes have.

Layers along x stretch the axis by s = 1 + sigma / (i omega + alpha) (Kuzuoglu and Mittra 1996):
the derivative along it becomes (1/s) d/dx. Here 1/s is a filter in time, by the bilinear transform:
with q = (sigma + alpha) dt/2, and the shift Z of one step,

    1/s = k + e / (Z - b)    k = (1 + alpha dt/2) / (1 + q)    b = (1 - q) / (1 + q)
                             e = -sigma dt / (1 + q)^2

so it has one memory m, with m_next = b m + e f, and makes k f + m of f.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpigrad._shapes import Float
from mpigrad.waves.absorbing import WaveTile, damping, largest_damping

__all__ = ["LayerFilter", "layer_filter"]

# alpha, as a fraction of the largest damping along the axis. With alpha = 0 a constant pressure in
# a corner would have no force that moves it back.
SHIFT = 0.05


class LayerFilter(NamedTuple):
    """Factors of the filter 1/s along an axis, each in this rank's cells along it.

    Attributes
    ----------
    k, b, e
        At the cell centres: of what passes, of the memory, and of what enters the memory.
    k_half, b_half, e_half
        The same at the faces behind the cells.
    """

    k: Float[np.ndarray, " n"]
    b: Float[np.ndarray, " n"]
    e: Float[np.ndarray, " n"]
    k_half: Float[np.ndarray, " n"]
    b_half: Float[np.ndarray, " n"]
    e_half: Float[np.ndarray, " n"]

    def between(self, cells: int) -> Float[np.ndarray, " n"]:
        """Return k halfway to the cells that lie `cells` further on (back, if negative)."""
        places = np.arange(len(self.k)) + min(cells, 0) + abs(cells) // 2
        return np.take(self.k_half if cells % 2 else self.k, places, mode="clip")


def layer_filter(
    tile: WaveTile, axis: int, dt: float, velocity: float, reflection: float
) -> LayerFilter:
    """Return the filter along an axis, which is 1 outside of the layers.

    Parameters
    ----------
    velocity, reflection
        As for `damping`.
    """
    h = tile.grid.spacing[axis]
    widths = [width for width in tile.pml[axis] if width]
    alpha = SHIFT * max((largest_damping(w * h, velocity, reflection) for w in widths), default=0)
    factors = []
    for offset in (0.0, 0.5):
        sigma = damping(tile, axis, velocity, reflection, offset)
        q = (sigma + alpha) * (dt / 2)
        inside = sigma > 0
        factors += [
            np.where(inside, (1 + alpha * dt / 2) / (1 + q), 1),
            np.where(inside, (1 - q) / (1 + q), 0),
            np.where(inside, -sigma * dt / (1 + q) ** 2, 0),
        ]
    return LayerFilter(*factors)
