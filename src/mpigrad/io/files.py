"""Files that are complete at any time: one file, or one for each rank and an index of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable
from typing import BinaryIO

from mpigrad.checkpoint.manifest import name_in_errors, sync_directory
from mpigrad.collective_errors import assert_same_on_all_ranks, call_on_root, raise_on_all_ranks
from mpigrad.communicator import Communicator

__all__ = [
    "check_path",
    "try_to_remove",
    "write_atomically",
    "write_pieces",
]

# ---- Write files that are complete at any time, even if the job is killed while it writes ----


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


# ---- Check the path of a file before anything is written, and remove directories ----


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


# ---- Write one file for each rank, and an index of these files that is replaced in one step ----


def write_pieces(
    comm: Communicator,
    path: pathlib.Path,
    suffix: str,
    write_piece: Callable[[BinaryIO], object],
    index: Callable[[str], str],
    directory: str = "pieces",
) -> None:
    """Write the pieces of all ranks, then the index (collective).

    The pieces are in the directory `u.pieces-0` next to the index `u.pvti`, or in the first one of
    these that does not exist. A reader of the index finds the complete old or the complete new
    pieces at any time. The old pieces are removed at the end.

    Parameters
    ----------
    comm
        The communicator of the ranks.
    path
        The index file.
    suffix
        The suffix of the pieces, for example ".vti".
    write_piece
        Function that writes this rank's piece to a binary file object.
    index
        Function that returns the text of the index for the name of the directory of the pieces.
    directory
        The word before the number in the name of the directory. Each kind of index has its own, so
        that `u.pvti` and `u.pvtu` can be neighbours.

    Raises
    ------
    OSError
        On all ranks: if a file cannot be written. The old files stay.
    """
    start = f"{path.stem}.{directory}-"
    pieces = call_on_root(comm, lambda: _make_directory(path, start))
    try:
        with raise_on_all_ranks(comm):
            write_atomically(pieces / f"{comm.rank}{suffix}", write_piece)
        with raise_on_all_ranks(comm):
            if comm.rank == 0:
                text = index(pieces.name).encode()
                write_atomically(path, lambda file: file.write(text))
                for old in set(_directories(path, start)) - {pieces}:
                    try_to_remove(old)
    except BaseException:
        if comm.rank == 0 and not _is_index_of(path, pieces):
            try_to_remove(pieces)
        raise


def _is_index_of(path: pathlib.Path, pieces: pathlib.Path) -> bool:
    """Return True if the file has the pieces, as after a rename that was done but has failed."""
    try:
        return f"{pieces.name}/" in path.read_text()
    except OSError:
        return path.is_file()


def _make_directory(path: pathlib.Path, start: str) -> pathlib.Path:
    """Make a directory for the pieces of a new index file."""
    for number in itertools.count():
        directory = path.with_name(f"{start}{number}")
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            return directory
    raise AssertionError


def _directories(path: pathlib.Path, start: str) -> list[pathlib.Path]:
    """Return the directories of pieces of an index file."""
    return [
        entry
        for entry in path.parent.iterdir()
        if entry.name.startswith(start) and entry.name.removeprefix(start).isdigit()
    ]
