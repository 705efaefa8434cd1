"""Halo exchange of star stencils across faces, for the XLA forms of waves.

`grid.halo_exchange` cannot do this at the same cost. It pads all axes of every field and sends the
corners to diagonal neighbours, while a star stencil needs each field padded along one axis only.
Two calls of it, one for each axis, would make two rounds of messages instead of one. It also needs
fields of the grid's tile with the tile's axes first, while waves have fields of (shots, x, y) on
tiles that are extended by absorbing layers: moving the axes would copy all fields in each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mpigrad.operations.neighborhood import exchange_with_neighbors
from mpigrad.waves.absorbing import WaveTile

__all__ = ["exchange_faces"]


def exchange_faces(
    tile: WaveTile, width: int, along_x: Sequence[jax.Array], along_y: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Pad fields along one axis with `width` layers of cells from the neighbouring tiles.

    One packed message goes to each neighbour across a face. Cells beyond the absorbing layers are
    zero.

    Parameters
    ----------
    along_x, along_y
        Fields of shape (..., nx, ny) and of the same dtype, to be padded along x or along y.

    Returns
    -------
    tuple
        The fields padded along x, of shape (..., nx + 2 width, ny), and the fields padded along y,
        of shape (..., nx, ny + 2 width).
    """
    fields = [list(along_x), list(along_y)]
    halos: dict[tuple[int, int], list[jax.Array]] = {}
    if tile.faces:
        layers = [
            [
                jax.lax.slice_in_dim(
                    f,
                    0 if face.step < 0 else f.shape[face.axis - 2] - width,
                    width if face.step < 0 else None,
                    axis=face.axis - 2 + f.ndim,
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
            shape[axis - 2] = width
            before, behind = (
                halos[axis, step][i] if (axis, step) in halos else jnp.zeros(shape, f.dtype)
                for step in (-1, 1)
            )
            results.append(jnp.concatenate([before, f, behind], axis=axis - 2))
        return results

    return pad(0), pad(1)
