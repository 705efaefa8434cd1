"""Write fields as a zarr group with labelled axes, which xarray opens."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_on_all_ranks
from mpigrad.grid import Grid
from mpigrad.io.files import (
    Slices,
    cells_from_all_ranks,
    check_fields,
    check_origin,
    check_path,
    try_to_remove,
)
from mpigrad.runtime import name_in_errors

__all__ = ["write_zarr"]


def write_zarr(
    path: str | os.PathLike[str],
    grid: Grid,
    fields: Mapping[str, Any],
    attributes: Mapping[str, Any] | None = None,
    *,
    snapshots: Mapping[float, Mapping[str, Any]] | None = None,
    units: Mapping[str, str] | None = None,
    origin: Sequence[float] | None = None,
) -> None:
    """Write fields as a zarr group with labelled axes. Each rank writes one chunk (collective).

    `xarray.open_zarr(path)` opens it, and `.to_netcdf("u.nc")` makes a NetCDF file of it. The group
    is written next to `path` and then renamed, so `path` never has a part of it.

    No rank holds a whole field. A chunk is as large as the largest tile. If the tiles are uneven,
    ranks first send each other the cells that lie in another rank's chunk. So every chunk is
    written by one rank, and readers see one plain array of shape (nx, ny) per field.

    Parameters
    ----------
    path
        The group, with the suffix `.zarr`. An existing group is replaced.
    grid
        The grid of the fields. Its cell centres are written as `x`, `y` and `z`.
    fields
        This rank's tile of each field, shape (lx, ly), or (lx, ly, components) for vectors. dtype:
        float32, float64, integers or bool. The names are the same on every rank.
    attributes
        Attributes of the group, in types that JSON can represent.
    snapshots
        Fields at several times: {0.0: {"u": u0}, 0.1: {"u": u1}}. They become arrays of shape
        (time, nx, ny), and the times the coordinate `time`.
    units
        The units of fields and of `x`, `y`, `z` and `time`, by name: {"x": "m", "u": "Pa"}.
    origin
        Coordinates of the grid's first corner. Default: zeros.

    Raises
    ------
    TypeError, ValueError
        On all ranks, before anything is written: if an argument is not valid.
    OSError
        On all ranks: if the directory of `path` does not exist, `path` is not a zarr group, or a
        file cannot be written. The old group stays.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import zarr
    >>> import mpigrad as mg
    >>> grid = mg.Grid((4, 2), (0.25, 0.5))
    >>> mg.io.write_zarr("u.zarr", grid, {"u": jnp.ones(grid.local_shape)}, units={"x": "m"})
    >>> group = zarr.open_group("u.zarr", mode="r")
    >>> group["u"].shape, group["u"].metadata.dimension_names
    ((4, 2), ('x', 'y'))
    """
    comm, path = grid.comm, check_path("write_zarr", path, grid.comm, ".zarr")
    corner = check_origin("write_zarr", grid, origin)
    axes: dict[str, NDArray[np.float64]] = {
        name: start + (np.arange(n, dtype=np.float64) + 0.5) * h
        for name, start, n, h in zip("xyz", corner, grid.shape, grid.spacing, strict=False)
    }
    arrays = [
        _Variable(name, (tile,), tuple(axes), grid.ndim)
        for name, tile in check_fields("write_zarr", grid, fields).items()
    ]
    with raise_on_all_ranks(comm):
        if not isinstance(snapshots, Mapping | None):
            raise TypeError(
                f"write_zarr: expected a dict of snapshots by time, got {type(snapshots).__name__}."
                " Write {0.0: {'u': u}}."
            )
    assert_same_on_all_ranks(comm, len(snapshots or {}), "write_zarr: the number of snapshots")
    if snapshots:
        times, series = _check_snapshots(grid, snapshots)
        dimensions = ("time", *axes)
        axes["time"] = times
        arrays += [_Variable(name, tiles, dimensions, grid.ndim) for name, tiles in series.items()]
    with raise_on_all_ranks(comm):
        components = [array.component for array in arrays if array.components]
        _check_names([*axes, *components, *(array.name for array in arrays)], units or {})
        if comm.rank == 0 and path.exists() and not (path / "zarr.json").is_file():
            raise FileExistsError(
                f"write_zarr: {path} exists and is not a zarr group. Choose another path."
            )
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with raise_on_all_ranks(comm), name_in_errors(path):
            if comm.rank == 0:
                _remove(temporary)
                _create_group(temporary, grid, axes, arrays, attributes or {}, units or {})
        for array in arrays:
            chunks = [cells_from_all_ranks(grid, t, _chunk_of(grid)) for t in array.tiles]
            with raise_on_all_ranks(comm), name_in_errors(path):
                if chunks[0].size:
                    _write_chunks(temporary, array, _chunk_of(grid)(comm.rank), chunks)
        with raise_on_all_ranks(comm), name_in_errors(path):
            if comm.rank == 0:
                _replace(temporary, path)
    except BaseException:
        if comm.rank == 0:
            try_to_remove(temporary)
        raise


@dataclasses.dataclass(frozen=True)
class _Variable:
    """An array of the group, and this rank's tiles of it, one for each time."""

    name: str
    tiles: tuple[NDArray[Any], ...]
    axes: tuple[str, ...]
    ndim: int

    @property
    def components(self) -> tuple[int, ...]:
        """The shape of the value of a cell."""
        return self.tiles[0].shape[self.ndim :]

    @property
    def component(self) -> str:
        """The name of the axis of components."""
        return f"{self.name}_component"

    @property
    def times(self) -> tuple[int, ...]:
        """The length of the axis of times, if the array has one."""
        return (len(self.tiles),) * (len(self.axes) > self.ndim)


def _check_snapshots(
    grid: Grid, snapshots: Mapping[float, Mapping[str, Any]]
) -> tuple[NDArray[np.float64], dict[str, tuple[NDArray[Any], ...]]]:
    """Return the times, and the tiles of each field at these times (collective)."""
    times = np.zeros(0)
    with raise_on_all_ranks(grid.comm):
        times = np.asarray(list(snapshots), float)
        if not np.all(np.isfinite(times)):
            raise ValueError(
                f"write_zarr: expected finite times of snapshots, got {list(snapshots)}."
            )
    assert_same_on_all_ranks(grid.comm, times.tolist(), "write_zarr: times of snapshots")
    fields = [check_fields("write_zarr", grid, shot) for shot in snapshots.values()]
    first = {name: (tile.dtype, tile.shape) for name, tile in fields[0].items()}
    for time, shot in zip(times, fields, strict=True):
        if {name: (tile.dtype, tile.shape) for name, tile in shot.items()} != first:
            raise ValueError(
                "write_zarr: expected the same fields, dtypes and components in all snapshots, got "
                f"{_listed(fields[0])} at time {times[0]:g} and {_listed(shot)} at time {time:g}."
            )
    return times, {name: tuple(shot[name] for shot in fields) for name in first}


def _listed(fields: Mapping[str, NDArray[Any]]) -> str:
    return ", ".join(f"{name} ({tile.dtype}, {tile.shape})" for name, tile in fields.items())


def _check_names(names: Sequence[str], units: Mapping[str, str]) -> None:
    """Raise an error if a name is given twice, or a unit is not of a name."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"write_zarr: the group would have two arrays or axes {name!r}. x, y, z and time "
                "are coordinates, and u_component is the axis of a vector u. Rename the field."
            )
        if name == "zarr.json":
            raise ValueError(
                "write_zarr: 'zarr.json' is the name of a file of the group. Rename the field."
            )
    for name in units:
        if name not in names:
            raise ValueError(
                f"write_zarr: expected units of {', '.join(names)}, got {units[name]!r} for "
                f"{name!r}. Correct the name."
            )


def _chunk_shape(grid: Grid) -> tuple[int, ...]:
    """Return the number of cells of a chunk along each axis. There are at most as many as tiles."""
    return tuple(-(-n // p) for n, p in zip(grid.shape, grid.dims, strict=True))


def _chunk_of(grid: Grid) -> Callable[[int], Slices]:
    """Return the function that gives the chunk of a rank, as slices of the whole grid."""
    return lambda rank: tuple(
        slice(min(place * c, n), min((place + 1) * c, n))
        for place, c, n in zip(grid.coords_of(rank), _chunk_shape(grid), grid.shape, strict=True)
    )


def _create_group(
    path: pathlib.Path,
    grid: Grid,
    axes: Mapping[str, NDArray[np.float64]],
    arrays: Sequence[_Variable],
    attributes: Mapping[str, Any],
    units: Mapping[str, str],
) -> None:
    """Create the group with its coordinates and empty arrays."""
    zarr = _zarr()
    group = zarr.create_group(path, attributes=dict(attributes))

    def unit(name: str) -> dict[str, str]:
        return {"units": units[name]} if name in units else {}

    for name, values in axes.items():
        group.create_array(name, data=values, dimension_names=(name,), attributes=unit(name))
    for array in arrays:
        components = array.components
        group.create_array(
            array.name,
            shape=(*array.times, *grid.shape, *components),
            chunks=((1,) * len(array.times) + _chunk_shape(grid) + components),
            dtype=array.tiles[0].dtype,
            dimension_names=array.axes + (array.component,) * len(components),
            attributes=unit(array.name),
        )
    with warnings.catch_warnings():  # it is an extension of the format, which others ignore
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path)  # else xarray warns


def _write_chunks(
    path: pathlib.Path, array: _Variable, place: Slices, chunks: Sequence[NDArray[Any]]
) -> None:
    """Write this rank's chunk for each time."""
    whole = _zarr().open_group(path, mode="r+")[array.name]
    for time, chunk in enumerate(chunks):
        whole[(time,) * len(array.times) + place] = chunk


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise ImportError("write_zarr: zarr is not installed. Run pip install zarr.") from error
    return zarr


def _replace(temporary: pathlib.Path, path: pathlib.Path) -> None:
    """Rename the new group to its path, and remove the old group."""
    old = path.with_name(f".{path.name}.replaced")
    _remove(old)
    if path.exists():
        path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            old.rename(path)
        raise
    try_to_remove(old)


def _remove(directory: pathlib.Path) -> None:
    """Remove the remains of a job that was killed."""
    if directory.exists():
        shutil.rmtree(directory)
