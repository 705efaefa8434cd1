"""Sums over ranks whose order is fixed: the same numbers, bit for bit, whoever adds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

__all__ = ["combine", "scale"]

_CHUNK = 1 << 15  # numbers that are added, scaled, squared and copied while they are in the cache


def _arithmetic(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which numbers are added and multiplied; factors, too, are rounded to it."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def scale(numbers: NDArray[Any], factor: float) -> None:
    """Multiply numbers by a factor, in place; those of 16 bits in float32."""
    dtype = _arithmetic(numbers.dtype)
    np.multiply(numbers, dtype.type(factor), out=numbers, dtype=dtype, casting="unsafe")


def combine(
    pieces: Sequence[NDArray[Any]],
    scale: float,
    out: NDArray[Any],
    copies: Sequence[NDArray[Any]] = (),
    spoiled: list[tuple[int, list[int]]] | None = None,
    factors: Sequence[float] | None = None,
) -> float:
    """Set `out` to ((pieces[0] + pieces[1]) + ...) · scale; the sum of its squares.

    Parameters
    ----------
    pieces
        Arrays of shape (n,), of one real floating-point dtype. Those of 16 bits are multiplied and
        added in float32.
    scale
        Rounded to the dtype that sums are made in.
    out, copies
        Shape (n,), the pieces' dtype; they may be pieces.
    spoiled
        Gets (index of a number that is not finite, the pieces that are not finite there), one for
        each chunk that has any.
    factors
        What each piece is multiplied by before; rounded as `scale`.

    Returns
    -------
    float
        Not finite where `out` has a number that is not (or where a square overflows).
    """
    dtype = _arithmetic(out.dtype)
    factor = dtype.type(scale)
    chunk = np.empty(min(_CHUNK, out.size), dtype)
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, out.size, _CHUNK):
            here = slice(start, min(start + _CHUNK, out.size))
            sums = chunk[: here.stop - start]
            terms = [piece[here] for piece in pieces]
            if factors is not None:
                terms = [
                    np.multiply(term, dtype.type(f), dtype=dtype, casting="unsafe")
                    for term, f in zip(terms, factors, strict=True)
                ]
            first, *rest = terms
            for piece in rest:
                np.add(first, piece, out=sums, dtype=dtype, casting="unsafe")
                first = sums
            np.multiply(first, factor, out=sums, dtype=dtype, casting="unsafe")
            if out.dtype != dtype:
                sums[:] = sums.astype(out.dtype)  # infinities where that has not the range
            square = float(np.dot(sums, sums))
            if not math.isfinite(square) and spoiled is not None:
                _look([piece[here] for piece in pieces], sums, start, spoiled)
            total += square
            for target in (out, *copies):
                target[here] = sums
    return total


def _look(
    pieces: Sequence[NDArray[Any]],
    sums: NDArray[Any],
    start: int,
    spoiled: list[tuple[int, list[int]]],
) -> None:
    bad = np.flatnonzero(~np.isfinite(sums))
    if bad.size:
        at = int(bad[0])
        whose = [i for i, piece in enumerate(pieces) if not jnp.isfinite(piece[at])]
        spoiled.append((start + at, whose or list(range(len(pieces)))))  # a sum may overflow
