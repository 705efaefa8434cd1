"""The native library of mpigrad's own multigrid, and its statistics."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from mpigrad.runtime.native import native_library
from mpigrad.runtime.processor import variant_library

__all__ = ["library", "totals"]


@functools.cache
def library() -> Any:
    """Return the library of multigrid for this processor."""
    lib = native_library(variant_library("multigrid"))
    assert lib is not None
    lib.mpigrad_multigrid_create.restype = ctypes.c_int64
    lib.mpigrad_multigrid_totals.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return lib


def totals() -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of set-up and solving, and the counts of set-ups, solves and systems."""
    spent, counts = np.zeros(2), np.zeros(3, np.int64)
    if library.cache_info().currsize:
        library().mpigrad_multigrid_totals(spent.ctypes.data, counts.ctypes.data)
    return spent, counts
