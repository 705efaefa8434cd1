"""The discrete Poisson equation: cell-centred finite volumes on the tiles of a grid."""

from __future__ import annotations

import dataclasses

import jax
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
    """Make a grid of nx x ny cells on the unit square (collective).

    Parameters
    ----------
    cells
        Numbers of cells (nx, ny).
    comm
        The ranks that share the grid; by default all ranks.
    dims
        Numbers of tiles along x and y; by default MPI chooses them.

    Examples
    --------
    >>> from mpigrad_apps.poisson import unit_square
    >>> unit_square((4, 2)).spacing
    (0.25, 0.5)
    """
    return Grid(cells, (1 / max(cells[0], 1), 1 / max(cells[1], 1)), comm, dims=dims)


@dataclasses.dataclass(frozen=True)
class Model:
    """The discrete equation div(kappa grad u) = f on the grid's rectangle, u = 0 on its boundary.

    The flux through the face between two cells is the mean of their kappa, times their difference
    of u, divided by their distance. A boundary face is half a cell away from the centre and uses
    the kappa of its cell. Multiplied by the area of a cell and -1, the equations are
    A(kappa) u = -f hx hy. The matrix A is symmetric positive definite, and the scheme is of second
    order in the spacing. `poisson` makes the model.
    """

    grid: Grid
    pattern: sparse.Pattern
    rhs: Float[Array, " rows"]
    sides: tuple[diffusion.Side, ...]

    def matrix(self, kappa: Float[Array, "lx ly"]) -> sparse.Matrix:
        """Assemble A(kappa) for this rank's tile of kappa (lx, ly). It is differentiable."""
        if kappa.shape != self.grid.local_shape:
            raise ValueError(
                f"poisson: kappa must have the shape of this rank's tile, {self.grid.local_shape}, "
                f"got {kappa.shape} on rank {self.grid.comm.rank}."
            )
        flows = diffusion.conductances(kappa, self.grid, self.sides)
        return sparse.Matrix.assemble(self.pattern, [sum(flows), *(-flow for flow in flows)])

    def solve(
        self,
        kappa: Float[Array, "lx ly"],
        solver: sparse.LinearSolver,
        guesses: sparse.Guesses | None = None,
        *,
        throw: bool = True,
    ) -> sparse.Solution:
        """Solve for this rank's tile of kappa (lx, ly). The value has shape (n_local,)."""
        return sparse.solve(self.matrix(kappa), self.rhs, solver, guesses, throw=throw)

    def solution(
        self, kappa: Float[Array, "lx ly"], solver: sparse.LinearSolver
    ) -> Float[Array, "lx ly"]:
        """Solve for u and return this rank's tile (lx, ly), differentiable in kappa."""
        return self.solve(kappa, solver).value.reshape(self.grid.local_shape)

    def roughness(self, field: Float[Array, "lx ly"]) -> Float[Array, ""]:
        """Compute this rank's share of the mean over cells of squared differences across faces."""
        return diffusion.roughness(field, self.grid, self.sides)


def poisson(grid: Grid, source: Float[Array, "lx ly"] | Float[np.ndarray, "lx ly"]) -> Model:
    """Make the Poisson model of a grid (collective).

    Parameters
    ----------
    grid
        A grid with two axes and any spacing.
    source
        This rank's tile of f at the centres of the cells, shape (lx, ly).

    Raises
    ------
    ValueError
        If the source does not have the shape of the tile.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpigrad_apps.poisson import poisson, unit_square
    >>> with jax.enable_x64(True):
    ...     grid = unit_square((8, 8))
    ...     model = poisson(grid, -jnp.ones(grid.local_shape))
    ...     solver = mg.sparse.default_solver(1e-8, model.pattern)
    ...     u = model.solution(jnp.ones(grid.local_shape), solver)
    >>> bool(jnp.all(u > 0))
    True
    """
    if source.shape != grid.local_shape:
        raise ValueError(
            f"poisson: the source must have the shape of this rank's tile, {grid.local_shape}, "
            f"got {source.shape} on rank {grid.comm.rank}."
        )
    sides = diffusion.sides(grid)
    pattern = sparse.Pattern.from_stencil(grid, [(0, 0), *(side.offset for side in sides)])
    area = grid.spacing[0] * grid.spacing[1]
    rhs = jax.jit(lambda f: -f.astype(jnp.float64).ravel() * area)(source)
    return Model(grid, pattern, rhs, sides)
