"""The discrete Poisson equation: cell-centred finite volumes on the tiles of a grid."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mpigrad import sparse
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.halo import halo_exchange

__all__ = ["Model", "poisson", "unit_square"]


def unit_square(
    cells: tuple[int, int],
    comm: Communicator | None = None,
    dims: tuple[int, int] | None = None,
) -> Grid:
    """A grid of nx x ny cells on the unit square."""
    return Grid(cells, (1 / max(cells[0], 1), 1 / max(cells[1], 1)), comm, dims)


@dataclasses.dataclass(frozen=True)
class Side:
    """The faces of a tile's cells on one side: across them lies the next cell along `axis`."""

    axis: int
    step: int
    # Face area over distance, along `axis`: 2 x on the boundary, half a cell away.
    weight: Float[np.ndarray, "lx 1"] | Float[np.ndarray, "1 ly"]

    @property
    def offset(self) -> tuple[int, int]:
        return (self.step, 0) if self.axis == 0 else (0, self.step)


@dataclasses.dataclass(frozen=True)
class Model:
    """div(kappa grad u) = f on the grid's rectangle, u = 0 on its boundary.

    Discretisation: the flux through the face between two cells is the mean of their kappa, times
    their difference of u over their distance; a boundary face is half a cell away from the centre
    and takes the cell's own kappa. Multiplied by a cell's area and -1, the equations are
    A(kappa) u = -f hx hy with A symmetric positive definite; second order in the spacing.

    Make it with `poisson`.
    """

    grid: Grid
    pattern: sparse.Pattern
    rhs: Float[Array, " rows"]
    sides: tuple[Side, ...]

    def matrix(self, kappa: Float[Array, "lx ly"]) -> sparse.Matrix:
        """A(kappa), in tile numbering, for this rank's tile of kappa (lx, ly); differentiable."""
        if kappa.shape != self.grid.local_shape:
            raise ValueError(
                f"poisson: kappa has shape {kappa.shape} on a tile of {self.grid.local_shape} "
                f"cells (rank {self.grid.comm.rank})"
            )
        padded = halo_exchange(kappa, self.grid, width=1, boundary="edge")
        diagonal = jnp.zeros_like(kappa)
        others: list[Array] = []
        for side in self.sides:
            beyond = padded[_shifted(side, kappa.shape)]
            coefficient = jnp.asarray(side.weight) * (kappa + beyond) / 2
            diagonal = diagonal + coefficient
            others.append(-coefficient)
        return self.pattern.matrix([diagonal, *others])

    def solve(
        self, kappa: Float[Array, "lx ly"], solver: sparse.LinearSolver, *, throw: bool = True
    ) -> sparse.Solution:
        """The discrete solution for this rank's tile of kappa; its value has shape (n_local,)."""
        return sparse.solve(self.matrix(kappa), self.rhs, solver, throw=throw)

    def solution(
        self, kappa: Float[Array, "lx ly"], solver: sparse.LinearSolver
    ) -> Float[Array, "lx ly"]:
        """Tile of u on this rank, of shape (lx, ly); differentiable in kappa."""
        return self.solve(kappa, solver).value.reshape(self.grid.local_shape)

    def roughness(self, field: Float[Array, "lx ly"]) -> Float[Array, ""]:
        """Share of this rank in the mean over cells of squared differences across faces."""
        padded = halo_exchange(field, self.grid, width=1, boundary="edge")
        differences = [
            field - padded[_shifted(side, field.shape)] for side in self.sides if side.step < 0
        ]
        return sum(jnp.sum(d**2) for d in differences) / self.grid.size  # type: ignore[return-value]


def poisson(grid: Grid, source: Float[Array, "lx ly"] | Float[np.ndarray, "lx ly"]) -> Model:
    """The Poisson model on a grid (collective).

    Parameters
    ----------
    grid
        The grid, any spacing.
    source
        This rank's tile of f at the cells' centres, of shape (lx, ly).
    """
    if source.shape != grid.local_shape:
        raise ValueError(
            f"poisson: the source has shape {source.shape} on a tile of {grid.local_shape} cells "
            f"(rank {grid.comm.rank})"
        )
    sides = tuple(_side(grid, axis, step) for axis in range(2) for step in (-1, 1))
    pattern = sparse.Pattern.from_stencil(grid, [(0, 0), *(side.offset for side in sides)])
    rhs = -jnp.asarray(source, jnp.float64).ravel() * (grid.spacing[0] * grid.spacing[1])
    return Model(grid, pattern, rhs, sides)


def _side(grid: Grid, axis: int, step: int) -> Side:
    across, along = grid.spacing[axis], grid.spacing[1 - axis]
    weight = np.full(grid.local_shape[axis], along / across)
    if grid.coords[axis] == (0 if step < 0 else grid.dims[axis] - 1):
        weight[0 if step < 0 else -1] *= 2
    return Side(axis, step, weight[:, None] if axis == 0 else weight[None, :])


def _shifted(side: Side, shape: tuple[int, ...]) -> tuple[slice, slice]:
    """Where, in a tile padded by one layer, the cells across a side's faces lie."""
    start = [1, 1]
    start[side.axis] += side.step
    return slice(start[0], start[0] + shape[0]), slice(start[1], start[1] + shape[1])
