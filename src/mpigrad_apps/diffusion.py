"""The operator div(kappa grad u) on the cells of a grid: faces and conductances."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mpigrad.grid import Grid, halo_exchange

__all__ = ["Boundary", "Side", "conductances", "roughness", "sides"]

Boundary = Literal["zero", "insulated"]


@dataclasses.dataclass(frozen=True)
class Side:
    """The faces of a tile's cells on one side, which lead to the next cells along `axis`.

    Attributes
    ----------
    axis, step
        The axis, and the direction along it: -1 or 1.
    ratio
        Area of a face divided by the distance between the centres of its two cells.
    factor
        1 inside the grid. On the boundary of the grid it is 2 if u is zero there, half a cell
        away, and 0 if the boundary is insulated.
    """

    axis: int
    step: int
    ratio: float
    factor: Float[np.ndarray, "lx 1"] | Float[np.ndarray, "1 ly"]

    @property
    def offset(self) -> tuple[int, int]:
        """Offset from a cell to the cell across the face."""
        return (self.step, 0) if self.axis == 0 else (0, self.step)

    def beyond(self, padded: Float[Array, "px py"]) -> Float[Array, "lx ly"]:
        """Return the cells across the faces from a tile that is padded by one layer."""
        lx, ly = padded.shape[0] - 2, padded.shape[1] - 2
        i, j = self.offset
        return padded[1 + i : 1 + i + lx, 1 + j : 1 + j + ly]


def sides(grid: Grid, boundary: Boundary = "zero") -> tuple[Side, ...]:
    """Return the four sides of this rank's cells, in the order left, right, lower, upper."""
    return tuple(_side(grid, axis, step, boundary) for axis in range(2) for step in (-1, 1))


def _side(grid: Grid, axis: int, step: int, boundary: Boundary) -> Side:
    factor = np.ones(grid.local_shape[axis])
    if grid.coords[axis] == (0 if step < 0 else grid.dims[axis] - 1):
        factor[0 if step < 0 else -1] = 2 if boundary == "zero" else 0
    return Side(
        axis,
        step,
        grid.spacing[1 - axis] / grid.spacing[axis],
        factor[:, None] if axis == 0 else factor[None, :],
    )


def conductances(
    kappa: Float[Array, "lx ly"], grid: Grid, faces: Sequence[Side]
) -> list[Float[Array, "lx ly"]]:
    """Compute the flow through each face for a unit difference of u across it (collective).

    The kappa of a face is the mean of its two cells, or the kappa of its one cell on the boundary.
    The result is differentiable.

    Parameters
    ----------
    kappa
        This rank's tile, shape (lx, ly).
    grid
        The grid.
    faces
        The result of `sides`.

    Returns
    -------
    One array of shape (lx, ly) for each side.
    """
    padded = halo_exchange(kappa, grid, width=1, boundary="edge")
    face_flows: dict[tuple[int, int], Array] = {}
    for axis in range(2):
        lower, upper = (s for s in faces if s.axis == axis)
        cells = kappa.shape[axis]
        around = padded[:, 1:-1] if axis == 0 else padded[1:-1, :]
        part = functools.partial(jax.lax.slice_in_dim, axis=axis)
        # Each face is computed once, without padded copies of the tile: XLA's code is twice as
        # fast.
        sums = jnp.concatenate(
            [
                part(around, 0, 1) + part(kappa, 0, 1),
                part(kappa, 0, cells - 1) + part(kappa, 1, cells),
                part(kappa, cells - 1, cells) + part(around, cells + 1, cells + 2),
            ],
            axis=axis,
        )
        factor = np.concatenate([lower.factor, np.take(upper.factor, [-1], axis)], axis=axis)
        flows = jnp.asarray(lower.ratio * factor / 2, jnp.result_type(kappa, float)) * sums
        face_flows |= {(axis, -1): part(flows, 0, cells), (axis, 1): part(flows, 1, cells + 1)}
    return [face_flows[s.axis, s.step] for s in faces]


def roughness(field: Float[Array, "lx ly"], grid: Grid, faces: Sequence[Side]) -> Float[Array, ""]:
    """Compute this rank's share of the mean over cells of squared differences across faces."""
    padded = halo_exchange(field, grid, width=1, boundary="edge")
    differences = [field - side.beyond(padded) for side in faces if side.step < 0]
    return sum(jnp.sum(d**2) for d in differences) / grid.size  # type: ignore[return-value]
