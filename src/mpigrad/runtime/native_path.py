"""Find the native libraries of this installation."""

from __future__ import annotations

import pathlib
import sys

__all__ = ["native_path"]


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
