"""Regularization of models."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from mpigrad.grid import Grid

__all__ = ["tikhonov", "total_variation", "window_with_neighbors"]

_ROUNDING = 1e-3  # difference below which the absolute value is rounded off


def window_with_neighbors(grid: Grid) -> tuple[slice, slice]:
    """Return this rank's tile, extended by the next cell along each axis if there is one."""
    x, y = (
        slice(p.start, min(p.stop + 1, n)) for p, n in zip(grid.slices, grid.shape, strict=True)
    )
    return x, y


def _differences(
    field: Float[Array, "wx wy"], grid: Grid, scale: float
) -> tuple[Float[Array, "lx ly"], Float[Array, "lx ly"]]:
    """Return differences to the next cell along x and y, over `scale`, zero at the last cell."""
    lx, ly = grid.local_shape
    edge = [(0, lx + 1 - field.shape[0]), (0, ly + 1 - field.shape[1])]
    padded = jnp.pad(field / scale, edge, mode="edge")
    here = padded[:-1, :-1]
    return padded[1:, :-1] - here, padded[:-1, 1:] - here


def tikhonov(
    fields: Mapping[str, Float[Array, "wx wy"]], grid: Grid, scales: Mapping[str, float]
) -> Float[Array, ""]:
    """Return this rank's share of the mean squared difference between neighbouring cells.

    Parameters
    ----------
    fields
        Fields in the window of `window_with_neighbors`.
    scales
        Scale of the differences of each field. Fields without a scale are left out.
    """
    total = jnp.zeros(())
    for name, scale in scales.items():
        dx, dy = _differences(fields[name], grid, scale)
        total = total + jnp.sum(dx**2 + dy**2)
    return total / grid.size


def total_variation(
    fields: Mapping[str, Float[Array, "wx wy"]], grid: Grid, scales: Mapping[str, float]
) -> Float[Array, ""]:
    """Return this rank's share of the mean over cells of sqrt(dx^2 + dy^2 + e^2) - e, e = 0.001.

    dx and dy are the differences to the next cells. The parameters are those of `tikhonov`. Jumps
    cost no more than slopes of the same height (Rudin, Osher and Fatemi 1992).
    """
    total = jnp.zeros(())
    for name, scale in scales.items():
        dx, dy = _differences(fields[name], grid, scale)
        total = total + jnp.sum(jnp.sqrt(dx**2 + dy**2 + _ROUNDING**2) - _ROUNDING)
    return total / grid.size
