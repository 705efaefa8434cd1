"""The operator div(kappa grad u) on the cells of a grid: its faces, and what flows through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mpigrad.grid import Grid
from mpigrad.halo import halo_exchange

__all__ = ["Boundary", "Side", "conductances", "roughness", "sides"]

Boundary = Literal["zero", "insulated"]


@dataclasses.dataclass(frozen=True)
class Side:
    """The faces of a tile's cells on one side: across them lies the next cell along `axis`.

    `ratio` is a face's area over the distance between the centres beside it. `factor` is 1, but on
    the boundary of the grid: 2 where u is zero there, half a cell away, and 0 where nothing flows.
    """

    axis: int
    step: int
    ratio: float
    factor: Float[np.ndarray, "lx 1"] | Float[np.ndarray, "1 ly"]

    @property
    def offset(self) -> tuple[int, int]:
        return (self.step, 0) if self.axis == 0 else (0, self.step)

    def beyond(self, padded: Float[Array, "px py"]) -> Float[Array, "lx ly"]:
        """The cells across the faces, of a tile that is padded by one layer."""
        lx, ly = padded.shape[0] - 2, padded.shape[1] - 2
        i, j = self.offset
        return padded[1 + i : 1 + i + lx, 1 + j : 1 + j + ly]


def sides(grid: Grid, boundary: Boundary = "zero") -> tuple[Side, ...]:
    """The four sides of this rank's cells, in the order left, right, lower, upper."""
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
    """What flows through each side's faces for a unit difference of u across them; differentiable.

    A face takes the mean kappa of the two cells beside it; one on the boundary its cell's own.
    """
    padded = halo_exchange(kappa, grid, width=1, boundary="edge")
    return [
        jnp.asarray(s.ratio * s.factor, kappa.dtype) * (kappa + s.beyond(padded)) / 2 for s in faces
    ]


def roughness(field: Float[Array, "lx ly"], grid: Grid, faces: Sequence[Side]) -> Float[Array, ""]:
    """Share of this rank in the mean over cells of squared differences across faces."""
    padded = halo_exchange(field, grid, width=1, boundary="edge")
    differences = [field - side.beyond(padded) for side in faces if side.step < 0]
    return sum(jnp.sum(d**2) for d in differences) / grid.size  # type: ignore[return-value]
