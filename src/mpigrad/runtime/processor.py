"""The variant of the native code for this processor: MPIGRAD_CPU, or the best that it runs."""

from __future__ import annotations

import ctypes
import functools
import os
import platform

from mpigrad.runtime.native_path import native_path

__all__ = [
    "VARIANTS",
    "check_processor",
    "has_avx",
    "processor_variant",
    "variant_library",
    "waves_library",
]

# In the order of native/processor.h. Other processors have one variant.
VARIANTS = ("x86-64", "x86-64-v3", "x86-64-v4") if platform.machine() == "x86_64" else ("baseline",)


@functools.cache
def _communication() -> ctypes.CDLL | None:
    """Load the communication library, which does not need MPI for this."""
    path = native_path("mpigrad_communication")
    return None if path is None else ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)


def has_avx() -> bool:
    """Return False on an x86-64 processor without AVX, which jaxlib needs."""
    lib = _communication()
    return lib is None or bool(lib.mpigrad_has_avx())


def processor_variant() -> str:
    """Return the variant that MPIGRAD_CPU names, or else the best one that this processor runs.

    Raises
    ------
    ImportError
        If MPIGRAD_CPU has another value, or one that this processor does not run.
    """
    lib = _communication()
    best = 0 if lib is None else lib.mpigrad_best_variant()
    name = os.environ.get("MPIGRAD_CPU") or VARIANTS[best]
    if name not in VARIANTS:
        raise ImportError(
            f"mpigrad: MPIGRAD_CPU must be one of {', '.join(VARIANTS)}, got {name!r}. Set it to "
            "one of them, or unset it: then the best one for each processor is used."
        )
    if VARIANTS.index(name) > best:
        raise ImportError(
            f"mpigrad: MPIGRAD_CPU is {name}, but this processor runs {VARIANTS[best]} at most. "
            f"Set it to {VARIANTS[best]}, or unset it."
        )
    return name


def check_processor() -> None:
    """Raise an ImportError if MPIGRAD_CPU is wrong or jaxlib would not run on this processor."""
    processor_variant()
    if not has_avx() and not os.environ.get("MPIGRAD_CPU"):
        raise ImportError(
            "mpigrad: this processor does not have AVX, which jaxlib needs. Use a processor of "
            "2011 or later. If your jaxlib was built without AVX, set MPIGRAD_CPU=x86-64."
        )


def variant_library(part: str) -> str:
    """Return the name of a library of array loops: the best that was built, up to this variant.

    Parameters
    ----------
    part
        "waves" or "multigrid".

    Raises
    ------
    ImportError
        If this installation has no such library for this processor.
    """
    variant = processor_variant()
    for name in reversed(VARIANTS[: VARIANTS.index(variant) + 1]):
        if native_path(f"mpigrad_{part}_{name}") is not None:
            return f"mpigrad_{part}_{name}"
    raise ImportError(
        f"mpigrad.{'waves' if part == 'waves' else 'sparse'}: this installation has no native "
        f"library of {part} for {variant}. Build it with `make setup` or `pip install .`, and "
        "leave MPIGRAD_VARIANTS as it is."
    )


def waves_library() -> str:
    """Return the name of the library of waves for this processor, see `variant_library`."""
    return variant_library("waves")
