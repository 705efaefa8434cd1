"""Halo exchange of star stencils across faces, for the XLA forms of waves.

`grid.halo_exchange` cannot do this at the same cost. It pads all axes of every field and sends the
corners to diagonal neighbours, while a star stencil needs each field padded along one axis only.
Two calls of it, one for each axis, would make two rounds of messages instead of one. It also needs
fields of the grid's tile with the tile's axes first, while waves have fields with the shots first,
on tiles that are extended by absorbing layers: moving the axes would copy all fields in each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mpigrad.operations.neighborhood import exchange_with_neighbors
from mpigrad.waves.absorbing import WaveTile

__all__ = ["exchange_faces"]


def exchange_faces(
    tile: WaveTile, width: int, *along: Sequence[jax.Array]
) -> tuple[list[jax.Array], ...]:
    """Pad fields along one axis with `width` layers of cells from the neighbouring tiles.

    One packed message goes to each neighbour across a face. Cells beyond the absorbing layers are
    zero.

    Parameters
    ----------
    along
        For each axis, the fields to be padded along it. They have the shape (..., nx, ny) or
        (..., nx, ny, nz), and the same dtype.

    Returns
    -------
    tuple
        For each axis its fields, longer by 2 width cells along this axis.
    """
    axes = tile.grid.ndim
    fields = [list(group) for group in along]
    halos: dict[tuple[int, int], list[jax.Array]] = {}
    if tile.faces:
        layers = [
            [
                jax.lax.slice_in_dim(
                    f,
                    0 if face.step < 0 else f.shape[face.axis - axes] - width,
                    width if face.step < 0 else None,
                    axis=face.axis - axes + f.ndim,
                )
                for f in fields[face.axis]
            ]
            for face in tile.faces
        ]
        counts = [sum(layer.size for layer in group) for group in layers]
        received = exchange_with_neighbors(
            f"halo_exchange(width={width})",
            jnp.concatenate([layer.ravel() for group in layers for layer in group]),
            neighbors=[face.rank for face in tile.faces],
            sendcounts=counts,
            recvcounts=counts,
            comm=tile.grid.comm,
        )
        start = 0
        for face, group in zip(tile.faces, layers, strict=True):
            pieces = []
            for layer in group:
                pieces.append(received[start : start + layer.size].reshape(layer.shape))
                start += layer.size
            halos[face.axis, face.step] = pieces

    def pad(axis: int) -> list[jax.Array]:
        results = []
        for i, f in enumerate(fields[axis]):
            shape = list(f.shape)
            shape[axis - axes] = width
            before, behind = (
                halos[axis, step][i] if (axis, step) in halos else jnp.zeros(shape, f.dtype)
                for step in (-1, 1)
            )
            results.append(jnp.concatenate([before, f, behind], axis=axis - axes))
        return results

    return tuple(pad(axis) for axis in range(axes))
