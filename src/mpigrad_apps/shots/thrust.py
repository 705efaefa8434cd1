"""A synthetic volume: folded layers that a thrust fault has moved, and a buried channel."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

__all__ = ["thrust_velocity"]

_LAYERS = (2500.0, 2850.0, 3200.0, 3550.0, 3950.0, 4400.0)  # m/s below the cover
_THICKNESS = 0.11  # of a layer below the cover. All lengths are in parts of the model's.
_COVER = 0.24  # mean depth of the cover's base
_THROW = 0.16  # how far the rocks above the fault have come up


def thrust_velocity(
    shape: tuple[int, ...], window: tuple[slice, ...]
) -> Float[np.ndarray, "lx ly lz"]:
    """Return the P velocity in m/s of a window of the cells.

    Sediments cover six folded layers whose velocity grows with depth. Along a dipping fault the
    layers on one side have moved up, so that fast rocks lie over slow ones, as in the Overthrust
    model (Aminzadeh, Brac and Kunz, "3-D salt and overthrust models", SEG, 1997). A slow, winding
    channel is cut into the base of the cover. The model has 2000 to 4650 m/s.

    Parameters
    ----------
    shape
        Number of cells of the whole model along x, y and z (downwards).
    window
        Slices of the cells to compute.

    Examples
    --------
    >>> from mpigrad_apps.shots.thrust import thrust_velocity
    >>> whole = thrust_velocity((16, 16, 12), (slice(0, 16), slice(0, 16), slice(0, 12)))
    >>> part = thrust_velocity((16, 16, 12), (slice(4, 8), slice(0, 16), slice(0, 12)))
    >>> bool((part == whole[4:8]).all()), bool(whole[..., -1].mean() > whole[..., 0].mean())
    (True, True)
    """
    along = [(np.arange(n)[part] + 0.5) / n for n, part in zip(shape, window, strict=True)]
    x, y, z = np.meshgrid(*along, indexing="ij")
    fold = 0.05 * np.sin(2 * np.pi * (0.9 * x + 0.15)) * np.cos(np.pi * (y - 0.3))
    fault = _COVER + 1.1 * (x - 0.2 - 0.25 * y)  # its depth, which grows along x
    depth = z + fold + _THROW * (z < fault)
    layer = np.clip(np.floor((depth - _COVER) / _THICKNESS).astype(int), 0, len(_LAYERS) - 1)
    vp = np.asarray(_LAYERS)[layer] + 250.0 * z
    base = _COVER + 0.3 * fold
    vp = np.where(z < base, 2000.0 + 700.0 * z, vp)
    middle = 0.5 + 0.22 * np.sin(2 * np.pi * (x + 0.1))
    channel = ((y - middle) / 0.11) ** 2 + ((z - base) / 0.1) ** 2 < 1
    return np.where(channel, 2050.0, vp)
