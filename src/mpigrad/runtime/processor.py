"""The native libraries of this installation, and their variant for this processor."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import platform
import sys

__all__ = [
    "ANY_MPI",
    "VARIANTS",
    "built_variants",
    "check_processor",
    "has_avx",
    "hypre_built_with",
    "native_path",
    "processor_variant",
    "variant_library",
    "waves_library",
]

# ---- Find the native libraries of this installation ----


ANY_MPI = "any MPI"
_MARKER = b"mpigrad-hypre-built-with:"


def native_path(name: str) -> pathlib.Path | None:
    """Return the path of the native library `name`, or None if it was not built.

    Only the standard library is used, because this is called before MPI is loaded.
    """
    # The search path of an editable package has the sources and the built files.
    for directory in sys.modules[__name__.partition(".")[0]].__path__:
        path = pathlib.Path(directory) / "_native" / f"lib{name}.so"
        if path.exists():
            return path
    return None


def hypre_built_with(path: pathlib.Path) -> str:
    """Return the MPI that a hypre module was built with, without loading it, or `ANY_MPI`."""
    _, marker, rest = path.read_bytes().partition(_MARKER)
    return rest.split(b"\0", 1)[0].decode(errors="replace") if marker else "an unknown MPI"


# ---- The variant of the native code for this processor: MPIGRAD_CPU, or the best that it runs


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


def built_variants(part: str) -> tuple[str, ...]:
    """Return the variants of a library of array loops that this installation has.

    A wheel has those with AVX2. A build from source has the one of the processor that built it,
    unless MPIGRAD_VARIANTS named others (cmake/variants.cmake).

    Parameters
    ----------
    part
        "waves" or "multigrid".
    """
    return tuple(v for v in VARIANTS if native_path(f"mpigrad_{part}_{v}") is not None)


def variant_library(part: str) -> str:
    """Return the name of a library of array loops for this processor.

    If MPIGRAD_CPU names a variant, it must be in this installation. Otherwise a lower variant than
    the best one is used if the installation was built on an older processor.

    Parameters
    ----------
    part
        "waves" or "multigrid".

    Raises
    ------
    ImportError
        If this installation has no such library for this processor, or not the one that
        MPIGRAD_CPU names.
    """
    variant, built = processor_variant(), built_variants(part)
    if not built:
        raise ImportError(
            f"mpigrad: this installation has no native library of {part}. Build it with "
            "`make setup` or `pip install .`"
        )
    if variant in built:
        return f"mpigrad_{part}_{variant}"
    only = f"this installation has {part} for {' and '.join(built)} only"
    if os.environ.get("MPIGRAD_CPU"):
        raise ImportError(
            f"mpigrad: MPIGRAD_CPU is {variant}, but {only}. Unset it, or build that "
            f"one: `MPIGRAD_VARIANTS={variant} make setup` or `MPIGRAD_VARIANTS={variant} pip "
            "install .`"
        )
    lower = [v for v in built if VARIANTS.index(v) < VARIANTS.index(variant)]
    if not lower:
        raise ImportError(
            f"mpigrad: this processor runs {variant} at most, but {only}. Build mpigrad on this "
            f"processor, or with `MPIGRAD_VARIANTS={variant} make setup` or "
            f"`MPIGRAD_VARIANTS={variant} pip install .`"
        )
    return f"mpigrad_{part}_{lower[-1]}"


def waves_library() -> str:
    """Return the name of the library of waves for this processor, see `variant_library`."""
    return variant_library("waves")
