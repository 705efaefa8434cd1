"""Check the path of a file before anything is written, and remove directories."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.communicator import Communicator

__all__ = ["check_path", "try_to_remove"]


def check_path(
    function: str, path: str | os.PathLike[str], comm: Communicator, suffix: str
) -> pathlib.Path:
    """Return the path if a file can be written there (collective).

    Raises
    ------
    ValueError
        On all ranks: if the path does not end with the suffix, has characters that cannot be
        printed, or differs between ranks.
    FileNotFoundError
        On all ranks: if rank 0 does not find the directory of the path.
    """
    path = pathlib.Path(path)
    assert_same_on_all_ranks(comm, str(path), f"{function}: path")
    if path.suffix != suffix or not path.name.isprintable():
        raise ValueError(
            f"{function}: expected the name of a file that ends with {suffix} and has printable "
            f"characters only, got {path.name!r}. Rename it."
        )
    with raise_on_all_ranks(comm):
        if comm.rank == 0 and not path.parent.is_dir():
            raise FileNotFoundError(
                f"{function}: the directory {path.parent} of {path} does not exist. Make it first."
            )
    return path


def try_to_remove(directory: pathlib.Path) -> None:
    """Remove a directory if it exists. An error is not raised, and leaves a part of it."""
    with contextlib.suppress(OSError):  # rmtree raises errors of close in any case
        shutil.rmtree(directory, ignore_errors=True)
