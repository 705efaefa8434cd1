"""Check the tiles of fields, and move cells to the rank that writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.grid import Grid

__all__ = ["cells_from_all_ranks", "check_fields", "check_name", "check_origin"]

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
                given = np.asarray(origin, float)
            except (TypeError, ValueError):
                given = np.array(np.nan)
            if given.shape != (grid.ndim,) or not np.all(np.isfinite(given)):
                raise ValueError(
                    f"{function}: expected {grid.ndim} finite coordinates as the origin, got "
                    f"{origin}. Give one for each axis of the grid."
                )
            corner = tuple(given.tolist())
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
    own = wanted(comm.rank)
    values = np.empty([*(p.stop - p.start for p in own), *tile.shape[grid.ndim :]], tile.dtype)
    for received in comm.mpi.alltoall(outgoing):
        if received is not None:
            common, piece = received
            values[_relative(common, own)] = piece
    return values


def _overlap(a: slice, b: slice) -> slice:
    start = max(a.start, b.start)
    return slice(start, max(start, min(a.stop, b.stop)))


def _relative(part: Slices, whole: Slices) -> Slices:
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, whole, strict=True)
    )
