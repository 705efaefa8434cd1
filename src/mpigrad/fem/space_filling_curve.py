"""Order points along a curve that keeps neighbours together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["morton_keys"]

# For each dimension the bits of a coordinate, and the steps that spread them out.
_SPREAD = {
    2: (
        31,
        (
            (16, 0x0000FFFF0000FFFF),
            (8, 0x00FF00FF00FF00FF),
            (4, 0x0F0F0F0F0F0F0F0F),
            (2, 0x3333333333333333),
            (1, 0x5555555555555555),
        ),
    ),
    3: (
        20,
        (
            (32, 0x001F00000000FFFF),
            (16, 0x001F0000FF0000FF),
            (8, 0x100F00F00F00F00F),
            (4, 0x10C30C30C30C30C3),
            (2, 0x1249249249249249),
        ),
    ),
}


def morton_keys(points: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return the positions of points on the Z-order curve (Morton, 1966).

    The bits of the coordinates, relative to the smallest cube around the points, alternate in the
    key. Points that follow each other in the order of the keys are mostly near each other.

    Parameters
    ----------
    points
        Coordinates of shape (n, 2) or (n, 3).
    """
    dim = points.shape[1]
    bits, steps = _SPREAD[dim]
    keys = np.zeros(len(points), np.uint64)
    if not len(points):
        return keys
    low = points.min(axis=0)
    size = float((points.max(axis=0) - low).max()) or 1.0
    scale = (2.0**bits - 1) / size
    for axis in range(dim):
        value = np.nan_to_num((points[:, axis] - low[axis]) * scale).astype(np.uint64)
        for shift, mask in steps:
            value = (value | value << np.uint64(shift)) & np.uint64(mask)
        keys |= value << np.uint64(axis)
    return keys
