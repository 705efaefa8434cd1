"""Which cells a tile gives to its neighbours and has from them, and what lies outside the grid."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpigrad.grid.grid import Grid
from mpigrad.operations.pytree_packing import array

__all__ = ["Boundary", "HaloLayout", "Part", "Step", "Width"]

Side = Literal["edge", "reflect", "symmetric", "periodic"] | float
Boundary = Side | Sequence[Side | tuple[Side, Side]]
Width = int | Sequence[tuple[int, int]]
Step = tuple[int, ...]

_NAMED = ("edge", "reflect", "symmetric", "periodic")


@dataclass(frozen=True)
class Part:
    """Along an axis, some cells of a tile (None: all), and the layers before (-1) or after (1)."""

    sides: tuple[int, ...] = (-1, 1)
    cells: slice | None = None


@dataclass(frozen=True)
class HaloLayout:
    """The layers around a tile: how wide they are, and where their cells come from.

    The layers fall into pieces, one for each step (-1, 0 or 1 along each axis) to a tile beside
    this one. All pieces that go from one rank to another travel together, ordered by the step
    that leads from the sender to the receiver.

    Attributes
    ----------
    widths
        Layers (before, after) the tile along each axis.
    sides
        What lies outside the grid (before, after) it along each axis.
    beside
        The rank of the tile at each step, this rank's own included, in the order of the steps.
    """

    grid: Grid
    widths: tuple[tuple[int, int], ...]
    sides: tuple[tuple[Side, Side], ...]
    beside: Mapping[Step, int]

    @staticmethod
    def of(grid: Grid, width: Width, boundary: Boundary, where: str) -> HaloLayout:
        """The layout of checked arguments; `where` begins the text of an error.

        What is checked does not depend on the rank: all ranks find the same mistake.
        """
        widths = _widths(width, grid.ndim, where)
        sides = _sides(boundary, grid.ndim, where)
        rings = [
            ring or pair[0] == "periodic" for ring, pair in zip(grid.periodic, sides, strict=True)
        ]
        for axis in range(grid.ndim):
            _check_reach(grid, axis, widths[axis], sides[axis], rings[axis], where)
        beside = {}
        for step in itertools.product((-1, 0, 1), repeat=grid.ndim):
            place = (
                (at + s) % tiles if ring else at + s
                for at, s, tiles, ring in zip(grid.coords, step, grid.dims, rings, strict=True)
            )
            rank = grid.rank_at(tuple(place))
            if rank is not None:
                beside[step] = rank
        return HaloLayout(grid, widths, sides, beside)

    def fields(self, u: Any, where: str) -> tuple[list[jax.Array], Any]:
        """The arrays of a pytree, and its structure, if they lie on the tile."""
        leaves, structure = jax.tree.flatten(u)
        arrays = [array(leaf) for leaf in leaves]
        cells = self.grid.local_shape
        for x in arrays:
            if x.shape[: self.grid.ndim] != cells:
                raise ValueError(
                    f"{where}: a field has shape {x.shape} on a tile of {cells} cells "
                    f"(rank {self.grid.comm.rank}); its first axes are the tile's"
                )
        return arrays, structure

    # --- the pieces ---

    def shape(self, step: Step) -> tuple[int, ...]:
        """Cells along each axis of the piece that lies at `step`."""
        return tuple(
            (n, after, before)[s]  # s = -1 is the last
            for s, n, (before, after) in zip(step, self.grid.local_shape, self.widths, strict=True)
        )

    def cells(self, step: Step) -> tuple[slice, ...]:
        """The cells of this tile in the layers of the tile at `step`."""
        return tuple(
            (slice(n), slice(n - before, n), slice(after))[s]
            for s, n, (before, after) in zip(step, self.grid.local_shape, self.widths, strict=True)
        )

    def given(self, rank: int, fields: Sequence[jax.Array]) -> list[jax.Array]:
        """The cells of fields that lie in a rank's layers, as they travel."""
        return [u[self.cells(step)] for step in self._steps_to(rank) for u in fields]

    def taken(
        self, rank: int, fields: Sequence[jax.Array]
    ) -> list[tuple[int, Step, tuple[int, ...]]]:
        """What comes from a rank, as it travels: of which field, from which step, its shape."""
        return [
            (i, step, (*self.shape(step), *u.shape[self.grid.ndim :]))
            for step in self._steps_from(rank)
            for i, u in enumerate(fields)
        ]

    def _steps_to(self, rank: int) -> list[Step]:
        return [s for s, r in self.beside.items() if r == rank and self._is_piece(_opposite(s))]

    def _steps_from(self, rank: int) -> list[Step]:
        """The steps of the pieces that come from a rank, by the step from there to here."""
        steps = reversed(list(self.beside))
        return [step for step in steps if self.beside[step] == rank and self._is_piece(step)]

    def _is_piece(self, step: Step) -> bool:
        return any(step) and math.prod(self.shape(step)) > 0

    @functools.cached_property
    def neighbors(self) -> tuple[int, ...]:
        """The other ranks that pieces go to or come from."""
        others = sorted({*self.beside.values()} - {self.grid.comm.rank})
        return tuple(r for r in others if self._steps_to(r) or self._steps_from(r))

    def own_pieces(self, u: jax.Array) -> dict[Step, jax.Array]:
        """The tile, and the pieces of its layers that are its own cells."""
        steps = self._steps_from(self.grid.comm.rank)
        own = {step: u[self.cells(_opposite(step))] for step in steps}
        return own | {(0,) * self.grid.ndim: u}

    # --- the tile in its layers ---

    def padded(
        self, pieces: Mapping[Step, jax.Array], part: Sequence[Part] | None = None
    ) -> jax.Array:
        """The pieces as they lie around the tile, then what lies outside the grid.

        In this order, as the nearest cell of a corner may be a neighbour's. With `part` only some
        cells of the tile along each axis, and the layers on some of its sides.
        """
        axes = range(self.grid.ndim)
        part = [Part()] * self.grid.ndim if part is None else part
        across = [
            [s for s in (-1, 0, 1) if s == 0 or (s in part[axis].sides and self._has(axis, s))]
            for axis in axes
        ]

        def together(steps: Step) -> jax.Array:
            """The pieces whose first steps are these, side by side along the other axes."""
            axis = len(steps)
            if axis == len(axes):
                cut = [
                    slice(None) if s or p.cells is None else p.cells
                    for p, s in zip(part, steps, strict=True)
                ]
                return pieces[steps][tuple(cut)]
            parts = [together((*steps, step)) for step in across[axis]]
            return jnp.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0]

        missing = [
            tuple(
                w if s in part[axis].sides and not self._has(axis, s) else 0
                for s, w in zip((-1, 1), self.widths[axis], strict=True)
            )
            for axis in axes
        ]
        return _extend(together(()), missing, self.sides)

    def _has(self, axis: int, s: int) -> bool:
        """Whether there are layers on a side, and a tile that they come from."""
        step = tuple(s if other == axis else 0 for other in range(self.grid.ndim))
        return step in self.beside and self.widths[axis][(s + 1) // 2] > 0


def _opposite(step: Step) -> Step:
    return tuple(-s for s in step)


def _extend(
    u: jax.Array,
    missing: Sequence[tuple[int, ...]],
    sides: Sequence[tuple[Side, Side]],
) -> jax.Array:
    """`u` with layers that lie outside the grid; of two constants in a corner the later axis'."""
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
    return jnp.pad(u, widths, constant_values=jnp.asarray(side, u.dtype))


# --- the arguments ---


def _widths(width: Any, axes: int, where: str) -> tuple[tuple[int, int], ...]:
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
            f"{where}: width must be a whole number of layers, or {axes} pairs (before, after) of "
            f"them, one for each axis, not {width!r}"
        )
    if min(itertools.chain(*pairs)) < 0 or max(itertools.chain(*pairs)) == 0:
        raise ValueError(
            f"{where}: width {width}: there must be layers, at least 0 on each side and 1 on one"
        )
    return pairs


def _sides(boundary: Any, axes: int, where: str) -> tuple[tuple[Side, Side], ...]:
    given = list(boundary) if isinstance(boundary, tuple | list) else [boundary] * axes
    pairs = [tuple(g) if isinstance(g, tuple | list) else (g, g) for g in given]
    known = all(
        len(pair) == 2
        and all(
            isinstance(side, numbers.Number) or (isinstance(side, str) and side in _NAMED)
            for side in pair
        )
        and (pair[0] == pair[1] or "periodic" not in pair)
        for pair in pairs
    )
    if len(pairs) != axes or not known:
        raise ValueError(
            f"{where}: boundary must be one of {', '.join(map(repr, _NAMED))} or a number, or one "
            f"for each of the {axes} axes, or there a pair for its two sides (of which none is "
            f"'periodic' alone), not {boundary!r}"
        )
    return tuple(pairs)  # type: ignore[return-value]


def _check_reach(
    grid: Grid,
    axis: int,
    widths: tuple[int, int],
    sides: tuple[Side, Side],
    ring: bool,
    where: str,
) -> None:
    """Refuse layers that reach past a neighbouring tile, or mirrors past the tile itself."""
    cells = grid.smallest_tile[axis]
    tiles = f"with tiles of at least {grid.smallest_tile} cells"
    remedy = "Use fewer ranks, other dims, or a smaller width"
    if (ring or grid.dims[axis] > 1) and max(widths) > cells:
        raise ValueError(
            f"{where}: width {max(widths)} along axis {axis} {tiles}: layers reach to that many "
            f"cells, not past the neighbouring tile. {remedy}"
        )
    for side, width in zip(sides, widths, strict=True):
        if ring or side not in ("reflect", "symmetric") or not width:
            continue
        needed = width + (side == "reflect")
        if needed > cells:
            raise ValueError(
                f'{where}: width {width} with the boundary "{side}" along axis {axis} {tiles}: '
                f"{needed} cells of the tile at the boundary are mirrored. {remedy}"
            )
