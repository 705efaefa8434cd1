"""Halo exchange: layers of cells around a tile, filled from the tiles that touch it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.grid.grid import Grid
from mpigrad.grid.halo_layout import Boundary, HaloLayout, Width
from mpigrad.operations import neighbor_alltoallv

__all__ = ["halo_exchange"]


def halo_exchange(u: Any, grid: Grid, width: Width = 1, boundary: Boundary = "edge") -> Any:
    """A tile of a field with layers of cells around it, edges and corners included.

    One packed message to each neighbouring rank, diagonal ones too, on a grid of any dimension,
    whatever the number of fields (one for each dtype). Linear in `u` (affine for a constant
    boundary); the adjoint sends each layer's cotangent back and adds it to the cells that it came
    from.

    Parameters
    ----------
    u
        This rank's tile of a field, of shape (lx, ly, *rest) on a grid with two axes; or a pytree
        of fields. Any dtype.
    grid
        The grid that `u` lies on.
    width
        Number of layers; or ((before, after), ...), a pair for each axis, of which any may be 0.
        At most the cells of the smallest tile along an axis that is divided or periodic.
    boundary
        What lies outside the grid, in NumPy's words: a constant, "edge" (the value of the nearest
        cell), "symmetric" (the field mirrored at the face of the boundary cell: no flux),
        "reflect" (mirrored at its centre), or "periodic". Of all sides; or one for each axis, or
        for each axis a pair (before, after). Along the periodic axes of `grid` nothing lies
        outside, and it has no meaning.

    Returns
    -------
    Any
        As `u`, each field of shape (lx + before + after, ly + before + after, *rest).

    Raises
    ------
    TypeError
        If `width` is not of one of its forms.
    ValueError
        On all ranks: if `width` is nowhere positive or reaches past a neighbouring tile, if a tile
        has too few cells to be mirrored, or if there is no such boundary; on its own rank if `u`
        does not have the tile's shape.
    """
    layout = HaloLayout.of(grid, width, boundary, "halo_exchange")
    fields, structure = layout.fields(u, "halo_exchange")
    pieces = [layout.own_pieces(field) for field in fields]
    for dtype in dict.fromkeys(field.dtype for field in fields) if layout.neighbors else ():
        members = [i for i, field in enumerate(fields) if field.dtype == dtype]
        some = [fields[i] for i in members]
        given = [layout.given(rank, some) for rank in layout.neighbors]
        taken = [layout.taken(rank, some) for rank in layout.neighbors]
        flat = [x.reshape(-1) for x in itertools.chain(*given)]
        received = neighbor_alltoallv(
            # A rank that only receives gives an empty part of its field: that is differentiable.
            jnp.concatenate(flat or [some[0].reshape(-1)[:0]]),
            neighbors=layout.neighbors,
            sendcounts=[sum(x.size for x in message) for message in given],
            recvcounts=[sum(math.prod(shape) for *_, shape in message) for message in taken],
            comm=grid.comm,
        )
        start = 0
        for i, step, shape in itertools.chain(*taken):
            end = start + math.prod(shape)
            pieces[members[i]][step] = received[start:end].reshape(shape)
            start = end
    return jax.tree.unflatten(structure, [layout.padded(p) for p in pieces])
