"""Write one file for each rank, and an index of these files that is replaced in one step."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
from collections.abc import Callable
from typing import BinaryIO

from mpigrad.collective_errors import call_on_root, raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.io.atomic_write import write_atomically
from mpigrad.io.paths import try_to_remove

__all__ = ["write_pieces"]


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
