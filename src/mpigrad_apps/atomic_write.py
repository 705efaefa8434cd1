"""Files that are always whole, even where the job is killed while it writes them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import BinaryIO

__all__ = ["write_atomically"]


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write a file beside `path`, then put it in its place in one step.

    Whoever reads `path`, at any time, reads all of the old file or all of the new one.
    """
    path = pathlib.Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
