"""Halo exchange: layers of cells around a tile, filled from the tiles that touch it."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

from mpigrad.grid import Grid, Neighbor
from mpigrad.operations import neighbor_alltoallv

__all__ = ["halo_exchange"]


def halo_exchange(
    u: jax.Array, grid: Grid, width: int = 1, boundary: Literal["edge"] | float = "edge"
) -> jax.Array:
    """A tile of a field with `width` layers around it, edges and corners included.

    One packed message to each neighbour, diagonal ones too, on a grid of any dimension, whatever
    the number of fields. Linear in `u` (affine for a constant boundary); the adjoint sends each
    layer's cotangent back and adds it to the cells that it came from.

    Parameters
    ----------
    u
        This rank's tile, of shape (lx, ly, *fields) on a grid with two axes.
    grid
        The grid that `u` lies on.
    width
        Number of layers; at most the cells of the smallest tile along each axis.
    boundary
        What lies outside the grid: "edge" (the value of the nearest cell of the grid) or a
        constant.

    Returns
    -------
    jax.Array
        Of shape (lx + 2 width, ly + 2 width, *fields).

    Raises
    ------
    ValueError
        If `u` does not have the tile's shape, `width` is less than 1 or reaches past a
        neighbouring tile, or `boundary` is neither "edge" nor a number.
    """
    _check(u, grid, width, boundary)
    axes = grid.ndim
    fields = u.shape[axes:]
    pieces: dict[tuple[int, ...], jax.Array] = {(0,) * axes: u}
    if grid.neighbors:
        layers = [_layer(grid, neighbor, width) for neighbor in grid.neighbors]
        shapes = [tuple(part.stop - part.start for part in layer) for layer in layers]
        counts = tuple(math.prod(shape) for shape in shapes)
        received = neighbor_alltoallv(
            jnp.concatenate([u[layer].reshape(-1, *fields) for layer in layers]),
            neighbors=tuple(neighbor.rank for neighbor in grid.neighbors),
            # The layer received across an edge or a corner has the shape of the layer sent there.
            sendcounts=counts,
            recvcounts=counts,
            comm=grid.comm,
        )
        start = 0
        for neighbor, shape, count in zip(grid.neighbors, shapes, counts, strict=True):
            piece = received[start : start + count]
            pieces[neighbor.step] = piece.reshape(*shape, *fields)
            start += count
    # The pieces, as they lie around the tile; then, as the nearest cell of a corner may be a
    # neighbour's, what lies outside the grid.
    across = [[step for step in (-1, 0, 1) if _in_grid(grid, axis, step)] for axis in range(axes)]

    def together(steps: tuple[int, ...]) -> jax.Array:
        """The pieces whose first steps are these, side by side along the other axes."""
        axis = len(steps)
        if axis == axes:
            return pieces[steps]
        return jnp.concatenate([together((*steps, step)) for step in across[axis]], axis=axis)

    padded = together(())
    missing = [
        (0 if _in_grid(grid, axis, -1) else width, 0 if _in_grid(grid, axis, 1) else width)
        for axis in range(axes)
    ] + [(0, 0)] * len(fields)
    if boundary == "edge":
        return jnp.pad(padded, missing, mode="edge")
    return jnp.pad(padded, missing, constant_values=jnp.asarray(boundary, u.dtype))


def _in_grid(grid: Grid, axis: int, step: int) -> bool:
    """Whether there is a tile `step` tiles away along an axis."""
    return 0 <= grid.coords[axis] + step < grid.dims[axis]


def _layer(grid: Grid, neighbor: Neighbor, width: int) -> tuple[slice, ...]:
    """The cells of this rank's tile that lie in a neighbour's layers."""
    span = {-1: lambda n: (0, width), 0: lambda n: (0, n), 1: lambda n: (n - width, n)}
    return tuple(
        slice(*span[step](n)) for step, n in zip(neighbor.step, grid.local_shape, strict=True)
    )


def _check(u: jax.Array, grid: Grid, width: int, boundary: object) -> None:
    if u.shape[: grid.ndim] != grid.local_shape:
        raise ValueError(
            f"halo_exchange: u has shape {u.shape} on a tile of {grid.local_shape} cells "
            f"(rank {grid.comm.rank}); its first axes are the tile's"
        )
    reaches_past = any(
        tiles > 1 and width > cells
        for tiles, cells in zip(grid.dims, grid.smallest_tile, strict=True)
    )
    if width < 1 or reaches_past:
        raise ValueError(
            f"halo_exchange: width {width} with tiles of at least {grid.smallest_tile} cells: "
            "a layer reaches from 1 to that many cells, not past the neighbouring tile. "
            "Use fewer ranks, other dims, or a smaller width"
        )
    if boundary != "edge" and not isinstance(boundary, int | float):
        raise ValueError(f'halo_exchange: boundary must be "edge" or a number, not {boundary!r}')
