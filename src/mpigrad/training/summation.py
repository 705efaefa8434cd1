"""Sums over ranks whose order is fixed: the same numbers, bit for bit, whoever adds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

__all__ = ["combine", "nonfinite"]

_CHUNK = 1 << 15  # numbers that are added, scaled and squared while they are in the cache


def combine(pieces: Sequence[NDArray[Any]], scale: float, out: NDArray[Any]) -> float:
    """Set `out` to ((pieces[0] + pieces[1]) + ...) · scale; the sum of its squares.

    Parameters
    ----------
    pieces
        Arrays of shape (n,), of one real floating-point dtype. Those of 16 bits are added in
        float32.
    scale
        Rounded to the dtype that sums are made in.
    out
        Shape (n,), the pieces' dtype; it may be one of them.

    Returns
    -------
    float
        Not finite where `out` has a number that is not (or where a square overflows).
    """
    dtype = np.dtype(np.float32) if out.dtype.itemsize < 4 else out.dtype
    factor = dtype.type(scale)
    chunk = np.empty(min(_CHUNK, out.size), dtype)
    total = 0.0
    for start in range(0, out.size, _CHUNK):
        target = out[start : start + _CHUNK]
        sums = target if target.dtype == dtype and len(pieces) < 3 else chunk[: target.size]
        first, *rest = (piece[start : start + _CHUNK] for piece in pieces)
        for piece in rest:
            np.add(first, piece, out=sums, dtype=dtype, casting="unsafe")
            first = sums
        np.multiply(first, factor, out=sums, dtype=dtype, casting="unsafe")
        if sums is not target:
            target[:] = sums
            if target.dtype != dtype:
                sums[:] = target  # what rounding to 16 bits has left, infinities too
        total += float(np.dot(sums, sums))
    return total


def nonfinite(numbers: NDArray[Any]) -> NDArray[np.bool_]:
    """Which numbers of a real floating-point array are infinite or none."""
    return (
        np.asarray(~jnp.isfinite(numbers)) if numbers.dtype.kind == "V" else ~np.isfinite(numbers)
    )
