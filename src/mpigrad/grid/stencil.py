"""Stencils on a tile whose interior is computed while the layers around it travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.communicator import derivative_slot
from mpigrad.grid.grid import Grid
from mpigrad.grid.halo_layout import Boundary, HaloLayout, Part, Step, Width
from mpigrad.operations.nonblocking import Request, post, wait, waitall
from mpigrad.operations.optimization_barrier import keep_in_order
from mpigrad.runtime.native import TAG_LIMIT

__all__ = ["apply_stencil"]

_TAG = TAG_LIMIT + 2  # no program has it, nor one of its derivatives


def apply_stencil(
    stencil: Callable[..., Any],
    u: Any,
    grid: Grid,
    width: Width = 1,
    boundary: Boundary = "edge",
    coefficients: tuple[Any, ...] = (),
) -> Any:
    """`stencil(halo_exchange(u, grid, width, boundary), *coefficients)`, with overlap.

    The messages are posted first, then the stencil is applied to the cells that need no layer,
    and when the messages have come to bands of cells along the tile's faces. The adjoint goes the
    same way back: it posts the bands' cotangents first.

    Parameters
    ----------
    stencil
        Function of one tile with layers, as `halo_exchange` pads it, and of the coefficients on
        the tile's cells, that returns an array, or pytree of arrays, on the tile's cells: of shape
        (lx, ly, *rest) for a tile of lx x ly cells. It is called for parts of the tile, and has to
        do the same for each cell.
    u, grid, width, boundary
        As for `halo_exchange`.
    coefficients
        Arrays, or pytrees of arrays, of shape (lx, ly, *rest), of which the stencil takes no cells
        but its own.

    Returns
    -------
    Any
        What the stencil returns, on the tile's cells.

    Raises
    ------
    TypeError, ValueError
        As `halo_exchange`; and if the stencil does not return one value for each cell.
    """
    layout = HaloLayout.of(grid, width, boundary, "apply_stencil")
    fields, structure = layout.fields(u, "apply_stencil")
    layout.fields(coefficients, "apply_stencil")
    requests = _begin(layout, fields)
    # Between the posts and the waits: compiled programs would compute the interior at any time.
    fields = keep_in_order(fields)
    pieces = [layout.own_pieces(field) for field in fields]

    def on(cells: list[slice], part: list[Part] | None = None) -> Any:
        around = [layout.padded(p, part) for p in pieces]
        mine = jax.tree.map(lambda x: x[tuple(cells)], coefficients)
        result = stencil(jax.tree.unflatten(structure, around), *mine)
        return _on_cells(result, around[0].shape[: grid.ndim], layout.widths)

    n, widths = grid.local_shape, layout.widths
    inner = [slice(before, k - after) for k, (before, after) in zip(n, widths, strict=True)]
    split = all(k > sum(pair) for k, pair in zip(n, widths, strict=True))
    try:
        interior = keep_in_order(on(inner, [Part(())] * grid.ndim)) if split else None
    finally:  # of an error, too: nothing is left over
        _end(requests, layout, fields, pieces)
    if not split:
        return on([slice(None)] * grid.ndim)

    def band(axis: int, side: int) -> Any:
        """The cells along a face for which layers are needed, within the axes before in `inner`."""
        (before, after), k = widths[axis], n[axis]
        # From one cell more than needed, so that there are enough for a mirror.
        near, computed, kept = {
            -1: (slice(before + after + 1), slice(before + 1), slice(before)),
            1: (slice(k - before - after - 1, k), slice(k - after - 1, k), slice(1, after + 1)),
        }[side]
        later = grid.ndim - axis - 1
        result = on(
            [*inner[:axis], computed, *[slice(None)] * later],
            [*[Part(())] * axis, Part((side,), near), *[Part()] * later],
        )
        return jax.tree.map(lambda x: x[(slice(None),) * axis + (kept,)], result)

    whole = interior
    for axis in reversed(range(grid.ndim)):
        before, after = widths[axis]
        parts = ([band(axis, -1)] if before else []) + [whole] + ([band(axis, 1)] if after else [])
        whole = jax.tree.map(lambda *p, axis=axis: jnp.concatenate(p, axis), *parts)
    return whole


def _begin(layout: HaloLayout, fields: list[jax.Array]) -> list[Request]:
    """Post the receive from each neighbour, then the send to each."""
    slot = derivative_slot(layout.grid.comm.slot)  # apart from the program's wildcard receives
    requests = []
    for rank in layout.neighbors:
        # Of a field, whose values do not count: what comes is differentiable, too.
        like = [
            jnp.broadcast_to(fields[i].reshape(-1)[0], shape)
            for i, _, shape in layout.taken(rank, fields)
        ]
        if like:
            requests.append(post("irecv", like, rank, _TAG, slot))
    for rank in layout.neighbors:
        if given := layout.given(rank, fields):
            requests.append(post("isend", given, rank, _TAG, slot))
    return requests


def _end(
    requests: list[Request],
    layout: HaloLayout,
    fields: list[jax.Array],
    pieces: list[dict[Step, jax.Array]],
) -> None:
    """Wait for what has been posted, and put what has come into its place."""
    received = {r.peer: r for r in requests if r.kind == "irecv"}
    for rank, request in received.items():
        taken = layout.taken(rank, fields)
        for (i, step, _), piece in zip(taken, wait(request), strict=True):
            pieces[i][step] = piece
    waitall(r for r in requests if r.kind == "isend")


def _on_cells(result: Any, padded: tuple[int, ...], widths: tuple[tuple[int, int], ...]) -> Any:
    """The result of a stencil, if it has one value for each cell of the tile that it got."""
    cells = tuple(n - sum(pair) for n, pair in zip(padded, widths, strict=True))
    for x in jax.tree.leaves(result):
        if jnp.shape(x)[: len(cells)] != cells:
            raise ValueError(
                f"apply_stencil: the stencil returned an array of shape {jnp.shape(x)} for a tile "
                f"of {cells} cells with layers {widths} around it; its first axes must be the "
                "tile's"
            )
    return result
