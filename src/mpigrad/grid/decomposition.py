"""The division of a grid's cells into tiles, and the checks of a grid's arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

__all__ = ["check_arguments", "choose_dims"]


def choose_dims(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Choose how many tiles along each axis `ranks` ranks divide `shape` cells into.

    It is like MPI_Dims_create, but takes the shape into account. Among all factorizations that
    leave no tile empty it chooses the one that cuts the fewest faces between cells, then the one
    whose largest tile is smallest, then the one with more tiles along the first axes.

    Raises
    ------
    ValueError
        If every factorization leaves a tile without a cell.
    """
    fitting = list(_factorizations(ranks, shape))
    if not fitting:
        most = next(n for n in range(ranks - 1, 0, -1) if any(_factorizations(n, shape)))
        raise ValueError(
            f"Grid: every tile must have a cell, but {ranks} ranks cannot share {_product(shape)} "
            f"cells: every division of {ranks} ranks into tiles has more tiles than cells along an "
            f"axis. Use at most {most} ranks (-n {most}), or more cells."
        )

    def cost(dims: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        size = math.prod(shape)
        cut = sum((p - 1) * (size // n) for p, n in zip(dims, shape, strict=True))
        largest = math.prod(math.ceil(n / p) for p, n in zip(dims, shape, strict=True))
        return cut, largest, tuple(-p for p in dims)

    return min(fitting, key=cost)


def _factorizations(ranks: int, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `ranks` as a product of one factor per axis, at most its cells."""
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
    """Return the grid's arguments in their own types, or raise an error."""
    try:
        cells = tuple(operator.index(n) for n in shape)
        lengths = tuple(float(h) for h in spacing)
        if not 1 <= len(cells) <= 3 or len(lengths) != len(cells):
            raise ValueError
    except (TypeError, ValueError):
        raise TypeError(
            "Grid: shape must be one to three integers, and spacing as many lengths, got "
            f"shape={shape!r}, spacing={spacing!r}. Write Grid((nx, ny), (hx, hy)), for example."
        ) from None
    if min(cells) < 1:
        raise ValueError(
            f"Grid: shape must have at least one cell along each axis, got {_product(cells)} "
            "cells. Give positive numbers."
        )
    if not all(h > 0 and math.isfinite(h) for h in lengths):
        raise ValueError(
            f"Grid: spacing must be positive and finite, got {lengths}. Give the size of a cell "
            "along each axis."
        )
    rings = (periodic,) * len(cells) if isinstance(periodic, bool) else periodic
    if not isinstance(rings, tuple | list) or [type(ring) for ring in rings] != [bool] * len(cells):
        raise TypeError(
            f"Grid: periodic must be True or False, or {len(cells)} of them, one per axis, got "
            f"{periodic!r}. Use bool() for other types."
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
            f"Grid: dims must be {len(cells)} integers, one per axis, got {dims!r}. Leave dims out "
            "to have them chosen."
        ) from None
    if min(tiles) < 1 or math.prod(tiles) != ranks:
        raise ValueError(
            f"Grid: dims must make one tile per rank, got dims {tiles}, which make "
            f"{math.prod(tiles)} tiles, for {ranks} ranks. Leave dims out to have them chosen."
        )
    if any(p > n for p, n in zip(tiles, cells, strict=True)):
        raise ValueError(
            f"Grid: every tile must have a cell, but dims {tiles} divide {_product(cells)} cells "
            "into tiles without cells. Leave dims out to have them chosen, or use fewer ranks."
        )
    return cells, lengths, tiles, rings
