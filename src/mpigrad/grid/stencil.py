"""Stencils on a tile whose interior is computed while the halo messages travel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from mpigrad.communicator import derivative_slot
from mpigrad.extend import TAG_LIMIT, jit_local, keep_in_order, post
from mpigrad.grid.grid import Grid
from mpigrad.grid.halo_exchange import Boundary, HaloLayout, Part, Step, Width
from mpigrad.operations import Request, wait, waitall

__all__ = ["apply_stencil"]

_TAG = TAG_LIMIT + 2  # neither a program nor one of its derivatives uses this tag


def apply_stencil(
    stencil: Callable[..., Any],
    u: Any,
    grid: Grid,
    width: Width = 1,
    boundary: Boundary = "edge",
    coefficients: tuple[Any, ...] = (),
) -> Any:
    """Apply a stencil to a field with its halo, and overlap messages and computation.

    The result is `stencil(halo_exchange(u, grid, width, boundary), *coefficients)`. The messages
    are posted first. Then the stencil is applied to the interior, the cells that need no layer.
    When the messages have arrived, it is applied to bands of cells along the faces of the tile. The
    adjoint does the same in reverse: it posts the cotangents of the bands first.

    Parameters
    ----------
    stencil
        Function of one tile with layers, as `halo_exchange` pads it, and of the coefficients on the
        cells of the tile. It returns an array, or pytree of arrays, on the cells of the tile: of
        shape (lx, ly, *rest) for a tile of lx x ly cells. It is called for parts of the tile, and
        must do the same for each cell.
    u, grid, width, boundary
        As for `halo_exchange`.
    coefficients
        Arrays, or pytrees of arrays, of shape (lx, ly, *rest). The stencil reads them only at the
        cell that it computes.

    Returns
    -------
    Any
        The result of the stencil on the cells of the tile.

    Raises
    ------
    TypeError, ValueError
        As for `halo_exchange`, and if the stencil does not return one value for each cell.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.grid import Grid, apply_stencil
    >>> grid = Grid((4,), spacing=(1.0,))
    >>> def laplacian(p):
    ...     return p[2:] - 2 * p[1:-1] + p[:-2]
    >>> apply_stencil(laplacian, jnp.arange(4.0) ** 2, grid)
    Array([ 1.,  2.,  2., -5.], dtype=float32)
    """
    layout = HaloLayout.of(grid, width, boundary, "apply_stencil")
    fields, structure = layout.fields(u, "apply_stencil")
    layout.fields(coefficients, "apply_stencil")
    requests = _begin(layout, fields)
    # This keeps the interior between posts and waits: a compiled program could compute it at any
    # other time.
    fields = keep_in_order(fields)
    pieces = [layout.own_pieces(field) for field in fields]

    def on(around: list[Any], selected: tuple[Any, ...]) -> Any:
        result = stencil(jax.tree.unflatten(structure, around), *selected)
        return _on_cells(result, around[0].shape[: grid.ndim], layout.widths)

    def results(which: Which) -> list[Any]:
        around = [_around(layout, which, p) for p in pieces]
        parts, tree = jax.tree.flatten(coefficients)
        selected = [_selected(layout, which, x) for x in parts]
        return [
            on([a[k] for a in around], jax.tree.unflatten(tree, [x[k] for x in selected]))
            for k in range(len(around[0]))
        ]

    split = all(k > sum(pair) for k, pair in zip(grid.local_shape, layout.widths, strict=True))
    try:
        interior = keep_in_order(results("interior")[0]) if split else None
    finally:  # after an error, too: each request must be waited for
        _end(requests, layout, fields, pieces)
    if not split:
        return results("tile")[0]
    join = functools.partial(_joined, layout)
    return jax.tree.map(lambda *parts: join(list(parts)), interior, *results("bands"))


Which = Literal["tile", "interior", "bands"]


class _Region(NamedTuple):
    """Cells on which the stencil is computed at once, and the part of the tile that it reads."""

    cells: tuple[slice, ...]
    part: list[Part]


def _regions(layout: HaloLayout, which: Which) -> list[_Region]:
    axes, n = layout.grid.ndim, layout.grid.local_shape
    if which == "tile":
        return [_Region((slice(None),) * axes, [Part()] * axes)]
    inner = tuple(
        slice(before, k - after) for k, (before, after) in zip(n, layout.widths, strict=True)
    )
    if which == "interior":
        return [_Region(inner, [Part(())] * axes)]
    return [_band(layout, inner, axis, side) for axis, side in _faces(layout)]


def _faces(layout: HaloLayout) -> list[tuple[int, int]]:
    """Return the axis and the side of each face with layers, in the order in which they join."""
    return [
        (axis, side)
        for axis in reversed(range(layout.grid.ndim))
        for side, width in zip((-1, 1), layout.widths[axis], strict=True)
        if width
    ]


def _band(layout: HaloLayout, inner: tuple[slice, ...], axis: int, side: int) -> _Region:
    """Return the cells along a face that need layers; inner cells only along earlier axes."""
    (before, after), k = layout.widths[axis], layout.grid.local_shape[axis]
    # One cell more than needed, so that there are enough cells for a mirror.
    near, computed = {
        -1: (slice(before + after + 1), slice(before + 1)),
        1: (slice(k - before - after - 1, k), slice(k - after - 1, k)),
    }[side]
    later = layout.grid.ndim - axis - 1
    return _Region(
        (*inner[:axis], computed, *[slice(None)] * later),
        [*[Part(())] * axis, Part((side,), near), *[Part()] * later],
    )


# Local parts are single programs: outside of jit JAX compiles each operation by itself.
@jit_local(static_argnames=("layout", "which"))
def _around(layout: HaloLayout, which: Which, pieces: dict[Step, jax.Array]) -> list[jax.Array]:
    """Return a field in each region, with layers."""
    return [layout.padded(pieces, region.part) for region in _regions(layout, which)]


@jit_local(static_argnames=("layout", "which"))
def _selected(layout: HaloLayout, which: Which, coefficient: jax.Array) -> list[jax.Array]:
    return [coefficient[region.cells] for region in _regions(layout, which)]


@jit_local(static_argnames=("layout",))
def _joined(layout: HaloLayout, results: list[jax.Array]) -> jax.Array:
    """Return the result on the whole tile from those in the interior and in the bands."""
    whole, *bands = results
    rest = iter(bands)
    for axis in reversed(range(layout.grid.ndim)):
        before, after = layout.widths[axis]
        parts = [whole]
        for side, cells in ((-1, slice(before)), (1, slice(1, after + 1))):
            if (axis, side) in _faces(layout):
                place = (slice(None),) * axis + (cells,)
                band = next(rest)[place]
                parts = [band, *parts] if side < 0 else [*parts, band]
        whole = jnp.concatenate(parts, axis)
    return whole


def _begin(layout: HaloLayout, fields: list[jax.Array]) -> list[Request]:
    """Post the receive from each neighbour, then the send to each."""
    # On another communicator than the wildcard receives of the program.
    slot = derivative_slot(layout.grid.comm.slot)
    requests = []
    messages = [_messages(layout, u) for u in fields]
    for kind, parts in zip(("irecv", "isend"), zip(*messages, strict=True), strict=True):
        for rank, *of_fields in zip(layout.neighbors, *parts, strict=True):
            # The order of a message: by step, then by field.
            if pieces := list(itertools.chain(*zip(*of_fields, strict=True))):
                requests.append(post(kind, pieces, rank, _TAG, slot))
    return requests


@jit_local(static_argnames=("layout",))
def _messages(
    layout: HaloLayout, u: jax.Array
) -> tuple[list[list[jax.Array]], list[list[jax.Array]]]:
    """Return templates of the pieces of a field from each neighbour, and the pieces for each."""
    # Made from the field, so the received values are active, too. Its values are not used.
    templates = [
        [jnp.broadcast_to(u.reshape(-1)[0], shape) for *_, shape in layout.incoming(rank, [u])]
        for rank in layout.neighbors
    ]
    return templates, [layout.outgoing(rank, [u]) for rank in layout.neighbors]


def _end(
    requests: list[Request],
    layout: HaloLayout,
    fields: list[jax.Array],
    pieces: list[dict[Step, jax.Array]],
) -> None:
    """Wait for all requests, and put the received pieces into their places."""
    received = {r.peer: r for r in requests if r.kind == "irecv"}
    for rank, request in received.items():
        incoming = layout.incoming(rank, fields)
        for (i, step, _), piece in zip(incoming, wait(request), strict=True):
            pieces[i][step] = piece
    waitall(r for r in requests if r.kind == "isend")


def _on_cells(result: Any, padded: tuple[int, ...], widths: tuple[tuple[int, int], ...]) -> Any:
    """Return the result of a stencil if it has one value for each cell of its tile."""
    cells = tuple(n - sum(pair) for n, pair in zip(padded, widths, strict=True))
    for x in jax.tree.leaves(result):
        if jnp.shape(x)[: len(cells)] != cells:
            raise ValueError(
                f"apply_stencil: the first axes of the stencil's result must be those of the tile, "
                f"got shape {jnp.shape(x)} for a tile of {cells} cells with layers {widths} around "
                "it. Return one value for each cell."
            )
    return result
