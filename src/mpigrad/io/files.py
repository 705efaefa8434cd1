"""Files that are complete at any time, also one for each rank, and checks of fields."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks, call_on_root, raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.runtime import write_atomically

__all__ = [
    "cells_from_all_ranks",
    "check_fields",
    "check_name",
    "check_origin",
    "check_path",
    "try_to_remove",
    "write_pieces",
]

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


# ---- Check the tiles of fields, and move cells to the rank that writes them ----


Slices = tuple[slice, ...]
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_DTYPES = ("bool", *_INTEGERS, "float32", "float64")
_LONGEST = 200  # bytes of a name, which may become the name of a file


def check_name(function: str, name: object) -> str:
    """Return the name of a field if files can have it.

    Raises
    ------
    TypeError, ValueError
        If the name is not a str, or if a format does not allow it.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"{function}: expected str names of fields, got {name!r} of type "
            f"{type(name).__name__}. Use str names."
        )
    valid = name.isprintable() and "/" not in name and name == name.strip()
    if not (
        valid and name and len(name.encode()) <= _LONGEST and name[0] != "." and name[:2] != "__"
    ):
        raise ValueError(
            f"{function}: {name!r} is not a valid name of a field. Use at most {_LONGEST} bytes of "
            "printable characters without '/', that begin neither with '.' nor with '__'."
        )
    return name


def check_fields(function: str, grid: Grid, fields: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return this rank's tiles as arrays of shape (lx, ly) or (lx, ly, components) (collective).

    Raises
    ------
    TypeError, ValueError
        On all ranks: if the names, shapes or dtypes are not valid or differ between ranks.
    """
    arrays: dict[str, NDArray[Any]] = {}
    with raise_on_all_ranks(grid.comm):
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"{function}: expected a dict of fields, got {type(fields).__name__}. Write "
                "{'u': u}."
            )
        for name, field in fields.items():
            arrays[check_name(function, name)] = _checked(function, grid, name, field)
    kinds = [(name, str(a.dtype), a.shape[grid.ndim :]) for name, a in arrays.items()]
    what = f"{function}: names, dtypes and components of the fields"
    assert_same_on_all_ranks(grid.comm, kinds, what)
    return arrays


def _checked(function: str, grid: Grid, name: str, field: Any) -> NDArray[Any]:
    array = np.asarray(field)
    if array.dtype.name not in _DTYPES:
        remedy = "Convert it to float32 or float64."
        if array.dtype.kind == "c":
            remedy = "Write its real and its imaginary part as two fields."
        raise TypeError(
            f"{function}: expected real numbers of at most 64 bits, got dtype {array.dtype} for "
            f"{name!r} on rank {grid.comm.rank}. {remedy}"
        )
    rest = array.shape[grid.ndim :]
    if array.shape[: grid.ndim] != grid.local_shape or len(rest) > 1 or 0 in rest:
        raise ValueError(
            f"{function}: expected the shape of the tile, {grid.local_shape}, or that shape and "
            f"an axis of components, got {array.shape} for {name!r} on rank {grid.comm.rank}. Give "
            "this rank's tile without halos."
        )
    return array


def check_origin(function: str, grid: Grid, origin: Sequence[float] | None) -> tuple[float, ...]:
    """Return the coordinates of the grid's first corner as floats (collective).

    Raises
    ------
    ValueError
        On all ranks: if they are not one finite number for each axis, or differ between ranks.
    """
    corner = (0.0,) * grid.ndim
    with raise_on_all_ranks(grid.comm):
        if origin is not None:
            try:
                coordinates = np.asarray(origin, float)
            except (TypeError, ValueError):
                coordinates = np.array(np.nan)
            if coordinates.shape != (grid.ndim,) or not np.all(np.isfinite(coordinates)):
                raise ValueError(
                    f"{function}: expected {grid.ndim} finite coordinates as the origin, got "
                    f"{origin}. Give one for each axis of the grid."
                )
            corner = tuple(coordinates.tolist())
    assert_same_on_all_ranks(grid.comm, corner, f"{function}: origin")
    return corner


def cells_from_all_ranks(
    grid: Grid, tile: NDArray[Any], wanted: Callable[[int], Slices]
) -> NDArray[Any]:
    """Return the values of the cells that this rank wants, from the ranks that have them.

    It is collective.

    Parameters
    ----------
    tile
        This rank's tile, shape (lx, ly, *rest).
    wanted
        Function that returns the cells that a rank wants, as slices of the whole grid.
    """
    comm = grid.comm
    outgoing = []
    for rank in range(comm.size):
        common = tuple(map(_overlap, grid.slices, wanted(rank)))
        piece = tile[_relative(common, grid.slices)]
        outgoing.append((common, np.ascontiguousarray(piece)) if piece.size else None)
    region = wanted(comm.rank)
    values = np.empty([*(p.stop - p.start for p in region), *tile.shape[grid.ndim :]], tile.dtype)
    for received in comm.mpi.alltoall(outgoing):
        if received is not None:
            common, piece = received
            values[_relative(common, region)] = piece
    return values


def _overlap(a: slice, b: slice) -> slice:
    start = max(a.start, b.start)
    return slice(start, max(start, min(a.stop, b.stop)))


def _relative(part: Slices, whole: Slices) -> Slices:
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, whole, strict=True)
    )
