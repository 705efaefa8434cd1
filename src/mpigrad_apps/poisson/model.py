"""The discrete Poisson equation: cell-centred finite volumes on the tiles of a grid."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mpigrad import sparse
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad_apps import diffusion

__all__ = ["Model", "poisson", "unit_square"]


def unit_square(
    cells: tuple[int, int],
    comm: Communicator | None = None,
    dims: tuple[int, int] | None = None,
) -> Grid:
    """A grid of nx x ny cells on the unit square."""
    return Grid(cells, (1 / max(cells[0], 1), 1 / max(cells[1], 1)), comm, dims)


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
    sides: tuple[diffusion.Side, ...]

    def matrix(self, kappa: Float[Array, "lx ly"]) -> sparse.Matrix:
        """A(kappa), in tile numbering, for this rank's tile of kappa (lx, ly); differentiable."""
        if kappa.shape != self.grid.local_shape:
            raise ValueError(
                f"poisson: kappa has shape {kappa.shape} on a tile of {self.grid.local_shape} "
                f"cells (rank {self.grid.comm.rank})"
            )
        flows = diffusion.conductances(kappa, self.grid, self.sides)
        return sparse.Matrix.assemble(self.pattern, [sum(flows), *(-flow for flow in flows)])

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
        return diffusion.roughness(field, self.grid, self.sides)


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
    sides = diffusion.sides(grid)
    pattern = sparse.Pattern.from_stencil(grid, [(0, 0), *(side.offset for side in sides)])
    rhs = -jnp.asarray(source, jnp.float64).ravel() * (grid.spacing[0] * grid.spacing[1])
    return Model(grid, pattern, rhs, sides)
