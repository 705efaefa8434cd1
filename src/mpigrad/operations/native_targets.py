"""Native handlers as targets that compiled programs call."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from mpigrad.operations import _jax_compat as compat
from mpigrad.runtime.native import library

__all__ = ["register_target"]


@functools.cache
def register_target(name: str, lib: Any = None) -> str:
    """Register the native handler `name` with XLA, for CPUs and, staged on the host, for GPUs."""
    handler = getattr(library() if lib is None else lib, name)
    staged = library().mpigrad_staged(ctypes.cast(handler, ctypes.c_void_p), name.encode())
    if not staged:
        raise RuntimeError(
            f"mpigrad: cannot register the handler {name}: the table in native/gpu/staging.cc is "
            "full. Raise kTargets there."
        )
    compat.register_target(name, handler, staged)
    return name
