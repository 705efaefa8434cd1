"""Sums over ranks whose order is fixed: the same numbers, bit for bit, whoever adds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["combine"]

_CHUNK = 1 << 15  # numbers that are added and scaled while they are in the cache


def combine(pieces: Sequence[NDArray[Any]], scale: float, out: NDArray[Any]) -> float:
    """out = ((pieces[0] + pieces[1]) + ...) · scale, and the sum of its squares.

    Parameters
    ----------
    pieces
        Arrays of shape (n,), of one real floating-point dtype.
    scale
        Rounded to that dtype.
    out
        Shape (n,), that dtype; it may be one of the pieces.

    Returns
    -------
    Sum of the squares of `out`; not finite where `out` has a number that is not (or, rarely, where
    a square overflows).
    """
    factor = out.dtype.type(scale)
    chunk = np.empty(min(_CHUNK, out.size), out.dtype)
    total = 0.0
    for start in range(0, out.size, _CHUNK):
        target = out[start : start + _CHUNK]
        sums = chunk[: target.size]
        first, *rest = [piece[start : start + _CHUNK] for piece in pieces]
        for piece in rest[:1]:
            np.add(first, piece, out=sums)
        for piece in rest[1:]:
            np.add(sums, piece, out=sums)
        np.multiply(sums if rest else first, factor, out=target)
        total += float(np.einsum("i,i->", target, target, dtype=target.dtype))
    return total
