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
    """Register the native handler `name` with XLA, for CPUs and, with copied arrays, for GPUs."""
    handler = getattr(library() if lib is None else lib, name)

    def staged(platform: str) -> Any:
        address = ctypes.cast(handler, ctypes.c_void_p)
        found = library().mpigrad_staged(address, name.encode(), platform == "ROCM")
        if not found:
            raise RuntimeError(
                f"mpigrad: cannot register the handler {name}: the table in native/gpu/staging.cc "
                "is full. Raise kTargets there."
            )
        return found

    compat.register_target(name, handler, staged)
    return name
