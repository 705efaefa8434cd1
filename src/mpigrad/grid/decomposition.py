"""How a grid's cells are divided into tiles, and what a grid's arguments may be."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

__all__ = ["check_arguments", "choose_dims"]


def choose_dims(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """How many tiles along each axis `ranks` ranks divide `shape` cells into.

    Like MPI_Dims_create, but adapted to the grid: of all factorizations that leave no tile
    empty, the one that cuts the fewest faces between cells, then the one whose largest tile is
    smallest, then the one with more tiles along the first axes.

    Raises
    ------
    ValueError
        If every factorization leaves a tile without a cell.
    """
    fitting = list(_factorizations(ranks, shape))
    if not fitting:
        raise ValueError(
            f"mpigrad.Grid: {ranks} ranks cannot share {_product(shape)} cells: every division of "
            f"{ranks} ranks into tiles has more tiles than cells along an axis. "
            "Use fewer ranks (-n) or more cells."
        )

    def cost(dims: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        size = math.prod(shape)
        cut = sum((p - 1) * (size // n) for p, n in zip(dims, shape, strict=True))
        largest = math.prod(math.ceil(n / p) for p, n in zip(dims, shape, strict=True))
        return cut, largest, tuple(-p for p in dims)

    return min(fitting, key=cost)


def _factorizations(ranks: int, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All ways to write `ranks` as a product of one factor per axis, none above its cells."""
    if not shape:
        yield from [()] if ranks == 1 else []
        return
    for p in range(1, min(ranks, shape[0]) + 1):
        if ranks % p == 0:
            yield from ((p, *rest) for rest in _factorizations(ranks // p, shape[1:]))


def _product(numbers: tuple[int, ...]) -> str:
    return " x ".join(map(str, numbers))


Arguments = tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...], tuple[bool, ...]]


def check_arguments(shape: Any, spacing: Any, dims: Any, periodic: Any, ranks: int) -> Arguments:
    """The grid's arguments in their own types, or an error that says what is wrong."""
    try:
        cells = tuple(operator.index(n) for n in shape)
        lengths = tuple(float(h) for h in spacing)
        if not 1 <= len(cells) <= 3 or len(lengths) != len(cells):
            raise ValueError
    except (TypeError, ValueError):
        raise TypeError(
            "mpigrad.Grid takes one to three whole numbers of cells, as shape=(nx, ny), and as "
            f"many lengths, as spacing=(hx, hy), not shape={shape!r}, spacing={spacing!r}"
        ) from None
    if min(cells) < 1:
        raise ValueError(f"mpigrad.Grid: a grid needs cells along each axis, not {_product(cells)}")
    if not all(h > 0 and math.isfinite(h) for h in lengths):
        raise ValueError(f"mpigrad.Grid: spacing must be positive lengths, not {lengths}")
    rings = (periodic,) * len(cells) if isinstance(periodic, bool) else periodic
    if not isinstance(rings, tuple | list) or [type(ring) for ring in rings] != [bool] * len(cells):
        raise TypeError(
            f"mpigrad.Grid: periodic must be True or False, or {len(cells)} of them, one per axis, "
            f"not {periodic!r}"
        )
    rings = tuple(rings)
    if dims is None:
        return cells, lengths, choose_dims(cells, ranks), rings
    try:
        tiles = tuple(operator.index(p) for p in dims)
        if len(tiles) != len(cells):
            raise ValueError
    except (TypeError, ValueError):
        raise TypeError(
            f"mpigrad.Grid: dims must be {len(cells)} whole numbers, one per axis, not {dims!r}"
        ) from None
    if min(tiles) < 1 or math.prod(tiles) != ranks:
        raise ValueError(
            f"mpigrad.Grid: dims {tiles} make {math.prod(tiles)} tiles for {ranks} ranks; "
            "there is one tile per rank"
        )
    if any(p > n for p, n in zip(tiles, cells, strict=True)):
        raise ValueError(
            f"mpigrad.Grid: dims {tiles} divide {_product(cells)} cells into tiles without cells; "
            "leave dims out to have them chosen, or use fewer ranks"
        )
    return cells, lengths, tiles, rings
