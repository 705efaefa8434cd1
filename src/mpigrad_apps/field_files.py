"""The files of fields of a run: a zarr group, and if asked the files that ParaView opens."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from mpigrad import io
from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.grid import Grid

__all__ = ["write_field_files"]


def write_field_files(
    path: pathlib.Path,
    grid: Grid,
    fields: Mapping[str, Any],
    attributes: Mapping[str, Any],
    *,
    vtk: bool,
    snapshots: Mapping[float, Mapping[str, Any]] | None = None,
    units: Mapping[str, str] | None = None,
) -> None:
    """Write `path`.zarr, and with `vtk` also `path`.pvti (collective).

    If there are snapshots, the files for ParaView are `path`.pvd and, for each time, a file in the
    directory `path`-vtk. The arguments are those of `mpigrad.io.write_zarr`.
    """
    io.write_zarr(
        path.with_suffix(".zarr"), grid, fields, attributes, snapshots=snapshots, units=units
    )
    if vtk and snapshots:
        _write_series(path, grid, fields, snapshots)
    elif vtk:
        io.write_vtk(path.with_suffix(".pvti"), grid, fields)


def _write_series(
    path: pathlib.Path,
    grid: Grid,
    fields: Mapping[str, Any],
    snapshots: Mapping[float, Mapping[str, Any]],
) -> None:
    directory = path.with_name(f"{path.name}-vtk")
    with raise_on_all_ranks(grid.comm):
        if grid.comm.rank == 0:
            if directory.exists():  # of an earlier run, which may have had more snapshots
                shutil.rmtree(directory)
            directory.mkdir()
    files = {}
    for number, (time, shot) in enumerate(snapshots.items()):
        files[time] = directory / f"{number:04d}.pvti"
        io.write_vtk(files[time], grid, {**fields, **shot})
    io.write_pvd(path.with_suffix(".pvd"), files, grid.comm)
