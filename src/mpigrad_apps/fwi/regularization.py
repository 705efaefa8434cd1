"""Regularization of models."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from mpigrad.grid import Grid

__all__ = ["tikhonov", "total_variation", "window_with_neighbors"]

_ROUNDING = 1e-3  # difference below which the absolute value is rounded off


def window_with_neighbors(grid: Grid) -> tuple[slice, ...]:
    """Return this rank's tile, extended by the next cell along each axis if there is one."""
    return tuple(
        slice(p.start, min(p.stop + 1, n)) for p, n in zip(grid.slices, grid.shape, strict=True)
    )


def _squared_differences(
    field: Float[Array, "*window"], grid: Grid, scale: float
) -> Float[Array, "*tile"]:
    """Return the sum of squares of the differences to the next cells, over `scale`.

    The difference of the last cell along an axis is zero.
    """
    edge = [(0, n + 1 - m) for n, m in zip(grid.local_shape, field.shape, strict=True)]
    padded = jnp.pad(field / scale, edge, mode="edge")
    here = padded[(slice(-1),) * grid.ndim]
    total = jnp.zeros_like(here)
    for axis in range(grid.ndim):
        behind = tuple(slice(1, None) if k == axis else slice(-1) for k in range(grid.ndim))
        total = total + (padded[behind] - here) ** 2
    return total


def tikhonov(
    fields: Mapping[str, Float[Array, "*window"]], grid: Grid, scales: Mapping[str, float]
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
        total = total + jnp.sum(_squared_differences(fields[name], grid, scale))
    return total / grid.size


def total_variation(
    fields: Mapping[str, Float[Array, "*window"]], grid: Grid, scales: Mapping[str, float]
) -> Float[Array, ""]:
    """Return this rank's share of the mean over cells of sqrt(d^2 + e^2) - e, e = 0.001.

    d^2 is the sum of the squared differences to the next cells along all axes. The parameters are
    those of `tikhonov`. Jumps cost no more than slopes of the same height (Rudin, Osher and Fatemi
    1992).
    """
    total = jnp.zeros(())
    for name, scale in scales.items():
        squares = _squared_differences(fields[name], grid, scale)
        total = total + jnp.sum(jnp.sqrt(squares + _ROUNDING**2) - _ROUNDING)
    return total / grid.size
