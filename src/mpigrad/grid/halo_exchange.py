"""Halo exchange: fill layers of cells around a tile from the neighbouring tiles."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.grid.grid import Grid
from mpigrad.grid.halo_layout import Boundary, HaloLayout, Width
from mpigrad.operations.carrier import without_carriers
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
    groups = [[fields[i] for i in members] for members in _by_dtype(fields)]
    groups = groups if layout.neighbors else []
    # Functions without messages are traced once, not again in each transformation.
    with without_carriers():
        outgoing = _outgoing(layout, groups) if groups else []
    received = [
        exchange_with_neighbors(
            _shown(layout.widths),
            message,
            neighbors=layout.neighbors,
            sendcounts=[layout.outgoing_size(rank, some) for rank in layout.neighbors],
            recvcounts=[
                sum(math.prod(shape) for *_, shape in layout.incoming(rank, some))
                for rank in layout.neighbors
            ],
            comm=grid.comm,
        )
        for message, some in zip(outgoing, groups, strict=True)
    ]
    with without_carriers():
        return jax.tree.unflatten(structure, _padded(layout, fields, received))


# These two functions are compiled as a whole: JAX differentiates a compiled function once, but
# single operations again in each exchange.
@functools.partial(jax.jit, static_argnums=0)
def _outgoing(layout: HaloLayout, groups: list[list[jax.Array]]) -> list[jax.Array]:
    """Return the message of each dtype, the parts for all neighbours in one array."""
    messages = []
    for some in groups:
        parts = itertools.chain(*(layout.outgoing(rank, some) for rank in layout.neighbors))
        flat = [x.reshape(-1) for x in parts]
        # A rank that only receives sends an empty part of its field, which is differentiable.
        messages.append(jnp.concatenate(flat or [some[0].reshape(-1)[:0]]))
    return messages


@functools.partial(jax.jit, static_argnums=0)
def _padded(
    layout: HaloLayout, fields: list[jax.Array], received: list[jax.Array]
) -> list[jax.Array]:
    """Return the fields with their layers, some of which were received."""
    pieces = [layout.own_pieces(field) for field in fields]
    for message, members in zip(received, _by_dtype(fields) if received else [], strict=True):
        some = [fields[i] for i in members]
        start = 0
        for i, step, shape in itertools.chain(
            *(layout.incoming(r, some) for r in layout.neighbors)
        ):
            end = start + math.prod(shape)
            pieces[members[i]][step] = message[start:end].reshape(shape)
            start = end
    return [layout.padded(p) for p in pieces]


def _by_dtype(fields: list[jax.Array]) -> list[list[int]]:
    """Return the indices of the fields of each dtype."""
    dtypes = dict.fromkeys(field.dtype for field in fields)
    return [[i for i, field in enumerate(fields) if field.dtype == dtype] for dtype in dtypes]


def _shown(widths: Sequence[tuple[int, int]]) -> str:
    """Return the text of the operation in reports, whose length is limited."""
    numbers = {n for pair in widths for n in pair}
    return f"halo_exchange(width={numbers.pop()})" if len(numbers) == 1 else "halo_exchange"
