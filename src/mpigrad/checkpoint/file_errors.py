"""Errors of files that name the file: those of write, fsync and close have no name."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

__all__ = ["name_in_errors"]


@contextlib.contextmanager
def name_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add a path to an error of this block that has an error number but does not name a file.

    Examples
    --------
    >>> import errno, os
    >>> from mpigrad.checkpoint.file_errors import name_in_errors
    >>> try:
    ...     with name_in_errors("saves"):
    ...         raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    ... except OSError as error:
    ...     print(error)
    [Errno 28] No space left on device: 'saves'
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(pathlib.Path(path))
        raise
