"""Sums over ranks in a fixed order, with the same bits on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

__all__ = ["combine", "scale"]

_CHUNK = 1 << 15  # numbers that are added, scaled, squared and copied together, within the cache


def _arithmetic(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of sums and products, to which factors are rounded, too."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def scale(numbers: NDArray[Any], factor: float) -> None:
    """Multiply numbers by a factor in place, with 16-bit numbers in float32 arithmetic."""
    dtype = _arithmetic(numbers.dtype)
    np.multiply(numbers, dtype.type(factor), out=numbers, dtype=dtype, casting="unsafe")


def combine(
    pieces: Sequence[NDArray[Any]],
    scale: float,
    out: NDArray[Any],
    copies: Sequence[NDArray[Any]] = (),
    nonfinite: list[tuple[int, list[int]]] | None = None,
    factors: Sequence[float] | None = None,
) -> float:
    """Set `out` to ((pieces[0] + pieces[1]) + ...) · scale, and return its sum of squares.

    Parameters
    ----------
    pieces
        Arrays of shape (n,) of one real floating-point dtype. The arithmetic for 16-bit dtypes is
        float32.
    scale
        The factor, which is rounded to the dtype of the arithmetic.
    out, copies
        Arrays of shape (n,) and the pieces' dtype that receive the result. They may be pieces.
    nonfinite
        A list that receives, for each chunk with a non-finite number, its index and the indices of
        the pieces that are not finite there.
    factors
        A factor for each piece, rounded like `scale`, by which it is multiplied before the sum.

    Returns
    -------
    float
        The sum of squares. It is not finite if `out` has a non-finite number, or if a square
        overflows.
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
                sums[:] = sums.astype(out.dtype)  # numbers out of range become infinite
            square = float(np.dot(sums, sums))
            if not math.isfinite(square) and nonfinite is not None:
                _look([piece[here] for piece in pieces], sums, start, nonfinite)
            total += square
            for target in (out, *copies):
                target[here] = sums
    return total


def _look(
    pieces: Sequence[NDArray[Any]],
    sums: NDArray[Any],
    start: int,
    nonfinite: list[tuple[int, list[int]]],
) -> None:
    bad = np.flatnonzero(~np.isfinite(sums))
    if bad.size:
        at = int(bad[0])
        whose = [i for i, piece in enumerate(pieces) if not jnp.isfinite(piece[at])]
        nonfinite.append((start + at, whose or list(range(len(pieces)))))  # a sum may overflow
