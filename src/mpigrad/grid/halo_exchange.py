"""Halo exchange: fill layers of cells around a tile from the neighbouring tiles."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpigrad.extend import arrays, as_array, exchange_with_neighbors, without_carriers
from mpigrad.grid.grid import Grid

__all__ = [
    "Boundary",
    "HaloLayout",
    "Part",
    "Step",
    "Width",
    "halo_exchange",
]

# ---- The layout of a halo: cells to send and to receive, and values outside the grid ----


Side = Literal["edge", "reflect", "symmetric", "periodic"] | float
Boundary = Side | Sequence[Side | tuple[Side, Side]]
Width = int | Sequence[tuple[int, int]]
Step = tuple[int, ...]

_NAMED = ("edge", "reflect", "symmetric", "periodic")


@dataclass(frozen=True)
class Part:
    """Some cells of a tile along an axis (None: all), and its layers before (-1) or after (1)."""

    sides: tuple[int, ...] = (-1, 1)
    cells: slice | None = None


@dataclass(frozen=True)
class HaloLayout:
    """The layers around a tile: their widths, and the ranks that their cells come from.

    The layers consist of pieces, one for each step (-1, 0 or 1 along each axis) to a neighbouring
    tile. All pieces that go from one rank to another travel together, ordered by the step from the
    sender to the receiver.

    Attributes
    ----------
    widths
        The number of layers (before, after) the tile along each axis.
    sides
        The boundary (before, after) the grid along each axis.
    tile_ranks
        The rank of the tile at each step, this rank's own tile included, in the order of steps.
    """

    grid: Grid
    widths: tuple[tuple[int, int], ...]
    sides: tuple[tuple[Side, Side], ...]
    tile_ranks: Mapping[Step, int] = field(hash=False)

    @staticmethod
    def of(grid: Grid, width: Width, boundary: Boundary, operation: str) -> HaloLayout:
        """Check the arguments of an operation, and return the layout.

        The checks do not depend on the rank: all ranks find the same error.
        """
        widths = _widths(width, grid.ndim, operation)
        sides = _sides(boundary, grid.ndim, operation)
        rings = [
            ring or pair[0] == "periodic" for ring, pair in zip(grid.periodic, sides, strict=True)
        ]
        for axis in range(grid.ndim):
            _check_reach(grid, axis, widths[axis], sides[axis], rings[axis], operation)
        return _layout(grid, widths, sides, tuple(rings))

    def fields(self, u: Any, operation: str) -> tuple[list[jax.Array], Any]:
        """Return the arrays of a pytree and its structure, if they have the shape of the tile."""
        leaves, structure = jax.tree.flatten(arrays(operation, u, "u"))
        cells = self.grid.local_shape
        for x in leaves:
            if x.shape[: self.grid.ndim] != cells:
                raise ValueError(
                    f"{operation}: the first axes of a field must be those of the tile of {cells} "
                    f"cells, got shape {x.shape} on rank {self.grid.comm.rank}. Give this rank's "
                    "tile of the field."
                )
        return leaves, structure

    # --- the pieces ---

    def shape(self, step: Step) -> tuple[int, ...]:
        """Return the number of cells along each axis of the piece at `step`."""
        return tuple(
            (n, after, before)[s]  # s = -1 is the last
            for s, n, (before, after) in zip(step, self.grid.local_shape, self.widths, strict=True)
        )

    def cells(self, step: Step) -> tuple[slice, ...]:
        """Return the cells of this tile that lie in the layers of the tile at `step`."""
        return tuple(
            (slice(n), slice(n - before, n), slice(after))[s]
            for s, n, (before, after) in zip(step, self.grid.local_shape, self.widths, strict=True)
        )

    def outgoing(self, rank: int, fields: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the pieces of fields to send to a rank, in the order of the message."""
        return [u[self.cells(step)] for step in self._steps_to(rank) for u in fields]

    def outgoing_size(self, rank: int, fields: Sequence[jax.Array]) -> int:
        """Return the number of elements in the pieces of fields to send to a rank."""
        cells = sum(math.prod(self.shape(_opposite(step))) for step in self._steps_to(rank))
        return sum(cells * math.prod(u.shape[self.grid.ndim :]) for u in fields)

    def incoming(
        self, rank: int, fields: Sequence[jax.Array]
    ) -> list[tuple[int, Step, tuple[int, ...]]]:
        """Return (field index, step, shape) of the pieces from a rank, in order of the message."""
        return [
            (i, step, (*self.shape(step), *u.shape[self.grid.ndim :]))
            for step in self._steps_from(rank)
            for i, u in enumerate(fields)
        ]

    def _steps_to(self, rank: int) -> list[Step]:
        return [s for s, r in self.tile_ranks.items() if r == rank and self._is_piece(_opposite(s))]

    def _steps_from(self, rank: int) -> list[Step]:
        """Return the steps of pieces from a rank, ordered by the step from that rank to here."""
        steps = reversed(list(self.tile_ranks))
        return [step for step in steps if self.tile_ranks[step] == rank and self._is_piece(step)]

    def _is_piece(self, step: Step) -> bool:
        return any(step) and math.prod(self.shape(step)) > 0

    @functools.cached_property
    def neighbors(self) -> tuple[int, ...]:
        """The other ranks that pieces go to or come from."""
        others = sorted({*self.tile_ranks.values()} - {self.grid.comm.rank})
        return tuple(r for r in others if self._steps_to(r) or self._steps_from(r))

    def own_pieces(self, u: jax.Array) -> dict[Step, jax.Array]:
        """Return the tile, and the pieces of its layers that are cells of the tile itself."""
        steps = self._steps_from(self.grid.comm.rank)
        pieces = {step: u[self.cells(_opposite(step))] for step in steps}
        return pieces | {(0,) * self.grid.ndim: u}

    # --- the tile in its layers ---

    def padded(
        self, pieces: Mapping[Step, jax.Array], part: Sequence[Part] | None = None
    ) -> jax.Array:
        """Assemble the pieces around the tile, then add the layers outside the grid.

        The order matters: the nearest cell of a corner may belong to a neighbour. `part` selects
        some cells of the tile along each axis, and the layers on some of its sides.
        """
        axes = range(self.grid.ndim)
        part = [Part()] * self.grid.ndim if part is None else part
        across = [
            [s for s in (-1, 0, 1) if s == 0 or (s in part[axis].sides and self._has(axis, s))]
            for axis in axes
        ]

        def assemble(steps: Step) -> jax.Array:
            """Concatenate the pieces whose first steps are these along the other axes."""
            axis = len(steps)
            if axis == len(axes):
                cut = [
                    slice(None) if s or p.cells is None else p.cells
                    for p, s in zip(part, steps, strict=True)
                ]
                return pieces[steps][tuple(cut)]
            parts = [assemble((*steps, step)) for step in across[axis]]
            return jnp.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0]

        missing = [
            tuple(
                w if s in part[axis].sides and not self._has(axis, s) else 0
                for s, w in zip((-1, 1), self.widths[axis], strict=True)
            )
            for axis in axes
        ]
        return _extend(assemble(()), missing, self.sides)

    def _has(self, axis: int, s: int) -> bool:
        """Return True if there are layers on a side, and a tile that they come from."""
        step = tuple(s if other == axis else 0 for other in range(self.grid.ndim))
        return step in self.tile_ranks and self.widths[axis][(s + 1) // 2] > 0


@functools.lru_cache(maxsize=1024)
def _layout(
    grid: Grid,
    widths: tuple[tuple[int, int], ...],
    sides: tuple[tuple[Side, Side], ...],
    rings: tuple[bool, ...],
) -> HaloLayout:
    tile_ranks = {}
    for step in itertools.product((-1, 0, 1), repeat=grid.ndim):
        place = (
            (at + s) % tiles if ring else at + s
            for at, s, tiles, ring in zip(grid.coords, step, grid.dims, rings, strict=True)
        )
        rank = grid.rank_at(tuple(place))
        if rank is not None:
            tile_ranks[step] = rank
    return HaloLayout(grid, widths, sides, tile_ranks)


def _opposite(step: Step) -> Step:
    return tuple(-s for s in step)


def _extend(
    u: jax.Array,
    missing: Sequence[tuple[int, ...]],
    sides: Sequence[tuple[Side, Side]],
) -> jax.Array:
    """Add layers outside the grid. In a corner between two constants the later axis decides."""
    rest = [(0, 0)] * (u.ndim - len(missing))
    kinds: set[Side] = {
        side
        for pair, widths in zip(sides, missing, strict=True)
        for side, width in zip(pair, widths, strict=True)
        if width
    }
    if not kinds:
        return u
    if len(kinds) == 1:
        return _pad(u, [*missing, *rest], next(iter(kinds)))
    nothing = [(0, 0)] * u.ndim
    for axis, (pair, (before, after)) in enumerate(zip(sides, missing, strict=True)):
        for side, widths in zip(pair, ((before, 0), (0, after)), strict=True):
            if any(widths):
                u = _pad(u, [*nothing[:axis], widths, *nothing[axis + 1 :]], side)
    return u


def _pad(u: jax.Array, widths: Sequence[tuple[int, ...]], side: Side) -> jax.Array:
    if isinstance(side, str):
        return jnp.pad(u, widths, mode=side)
    return jnp.pad(u, widths, constant_values=as_array(side, u.dtype))


# --- the arguments ---


def _widths(width: Any, axes: int, operation: str) -> tuple[tuple[int, int], ...]:
    pairs: tuple[tuple[int, int], ...] = ()
    try:
        if isinstance(width, tuple | list):
            pairs = tuple((operator.index(a), operator.index(b)) for a, b in width)
        else:
            layers = operator.index(width)
            pairs = ((layers, layers),) * axes
    except (TypeError, ValueError):
        pass
    if len(pairs) != axes:
        raise TypeError(
            f"{operation}: width must be an integer, or {axes} pairs (before, after) of integers, "
            f"one for each axis, got {width!r}. Write width=1, for example."
        )
    if min(itertools.chain(*pairs)) < 0 or max(itertools.chain(*pairs)) == 0:
        raise ValueError(
            f"{operation}: width must be at least 0 on each side and positive on one side, got "
            f"{width}. Give at least one layer."
        )
    return pairs


def _sides(boundary: Any, axes: int, operation: str) -> tuple[tuple[Side, Side], ...]:
    by_axis = list(boundary) if isinstance(boundary, tuple | list) else [boundary] * axes
    pairs = [tuple(b) if isinstance(b, tuple | list) else (b, b) for b in by_axis]
    is_valid = all(
        len(pair) == 2
        and all(
            isinstance(side, numbers.Number) or (isinstance(side, str) and side in _NAMED)
            for side in pair
        )
        and (pair[0] == pair[1] or "periodic" not in pair)
        for pair in pairs
    )
    if len(pairs) != axes or not is_valid:
        raise ValueError(
            f"{operation}: boundary must be a number or one of {', '.join(map(repr, _NAMED))}, or "
            f"one of these for each of the {axes} axes, or a pair of them for the two sides of an "
            f"axis, got {boundary!r}. Use 'periodic' for both sides of an axis, or for neither."
        )
    return tuple(pairs)  # type: ignore[return-value]


def _check_reach(
    grid: Grid,
    axis: int,
    widths: tuple[int, int],
    sides: tuple[Side, Side],
    ring: bool,
    operation: str,
) -> None:
    """Raise an error if layers reach past a neighbouring tile, or mirrors past the tile itself."""
    cells = grid.smallest_tile[axis]
    tiles = f"with tiles of at least {grid.smallest_tile} cells"
    remedy = "Use fewer ranks, other dims, or a smaller width"
    if (ring or grid.dims[axis] > 1) and max(widths) > cells:
        raise ValueError(
            f"{operation}: layers must not reach past the neighbouring tile, got width "
            f"{max(widths)} along axis {axis} {tiles}. {remedy}."
        )
    for side, width in zip(sides, widths, strict=True):
        if ring or side not in ("reflect", "symmetric") or not width:
            continue
        needed = width + (side == "reflect")
        if needed > cells:
            raise ValueError(
                f'{operation}: the boundary "{side}" with width {width} along axis {axis} mirrors '
                f"{needed} cells of the tile at the boundary, got a grid {tiles}. {remedy}."
            )


# ---- Halo exchange: fill layers of cells around a tile from the neighbouring tiles ----


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
