"""Write files that are complete at any time, even if the job is killed while it writes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
from collections.abc import Callable
from typing import BinaryIO

from mpigrad.checkpoint.file_errors import name_in_errors
from mpigrad.checkpoint.manifest import sync_directory

__all__ = ["write_atomically"]


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file next to `path`, then rename it to `path` in one step.

    A reader of `path` gets the complete old file or the complete new file at any time, also after
    the machine has failed. Several processes may write the same path.

    Parameters
    ----------
    path
        The file to write or to replace.
    write
        Function that writes the content to a binary file object.
    """
    path = pathlib.Path(path)
    # Processes of two hosts or containers may have the same id. Mode "x" makes a new file.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with name_in_errors(path), open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):  # it does not exist if it was renamed
            temporary.unlink()
