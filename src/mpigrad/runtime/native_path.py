"""Find the native libraries of this installation."""

from __future__ import annotations

import pathlib
import sys

__all__ = ["ANY_MPI", "hypre_built_with", "native_path"]

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
    _, found, rest = path.read_bytes().partition(_MARKER)
    return rest.split(b"\0", 1)[0].decode(errors="replace") if found else "an unknown MPI"
