"""Halo exchange: fill layers of cells around a tile from the neighbouring tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.grid.grid import Grid
from mpigrad.grid.halo_layout import Boundary, HaloLayout, Width
from mpigrad.operations.neighborhood import exchange_with_neighbors

__all__ = ["halo_exchange"]


def halo_exchange(u: Any, grid: Grid, width: Width = 1, boundary: Boundary = "edge") -> Any:
    """Exchange halo cells with neighbouring tiles, edges and corners included.

    One packed message for each dtype goes to each neighbouring rank, diagonal neighbours included.
    The number of messages does not depend on the number of fields. The exchange is linear in `u`
    (affine for a constant boundary). The adjoint sends the cotangent of each layer back and adds it
    to the cells that the layer came from.

    Parameters
    ----------
    u
        This rank's tile of a field, of shape (lx, ly, *rest) on a grid with two axes, or a pytree
        of fields. Any dtype.
    grid
        The grid of `u`.
    width
        The number of layers, or ((before, after), ...), a pair for each axis. Numbers of a pair may
        be 0. Along an axis that is divided or periodic, at most the cells of the smallest tile.
    boundary
        The values outside the grid, in NumPy's words: a constant, "edge" (the value of the nearest
        cell), "symmetric" (the field mirrored at the face of the boundary cell: no flux), "reflect"
        (mirrored at its centre), or "periodic". One value for all sides, one for each axis, or for
        each axis a pair (before, after). It is not used along the periodic axes of `grid`.

    Returns
    -------
    Any
        The fields in the structure of `u`, each of shape (lx + before + after, ly + before + after,
        *rest).

    Raises
    ------
    TypeError
        If `width` does not have one of its forms.
    ValueError
        On all ranks: if `width` is nowhere positive or reaches past a neighbouring tile, if a tile
        has too few cells to be mirrored, or if `boundary` is not valid. On its own rank: if `u`
        does not have the shape of the tile.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.grid import Grid, halo_exchange
    >>> grid = Grid((4,), spacing=(1.0,))
    >>> halo_exchange(jnp.arange(grid.n_local), grid, width=1, boundary="edge")
    Array([0, 0, 1, 2, 3, 3], dtype=int32)
    """
    layout = HaloLayout.of(grid, width, boundary, "halo_exchange")
    fields, structure = layout.fields(u, "halo_exchange")
    pieces = [layout.own_pieces(field) for field in fields]
    for dtype in dict.fromkeys(field.dtype for field in fields) if layout.neighbors else ():
        members = [i for i, field in enumerate(fields) if field.dtype == dtype]
        some = [fields[i] for i in members]
        outgoing = [layout.outgoing(rank, some) for rank in layout.neighbors]
        incoming = [layout.incoming(rank, some) for rank in layout.neighbors]
        flat = [x.reshape(-1) for x in itertools.chain(*outgoing)]
        received = exchange_with_neighbors(
            _shown(layout.widths),
            # A rank that only receives sends an empty part of its field, which is differentiable.
            jnp.concatenate(flat or [some[0].reshape(-1)[:0]]),
            neighbors=layout.neighbors,
            sendcounts=[sum(x.size for x in message) for message in outgoing],
            recvcounts=[sum(math.prod(shape) for *_, shape in message) for message in incoming],
            comm=grid.comm,
        )
        start = 0
        for i, step, shape in itertools.chain(*incoming):
            end = start + math.prod(shape)
            pieces[members[i]][step] = received[start:end].reshape(shape)
            start = end
    return jax.tree.unflatten(structure, [layout.padded(p) for p in pieces])


def _shown(widths: Sequence[tuple[int, int]]) -> str:
    """Return the text of the operation in reports, whose length is limited."""
    numbers = {n for pair in widths for n in pair}
    return f"halo_exchange(width={numbers.pop()})" if len(numbers) == 1 else "halo_exchange"
