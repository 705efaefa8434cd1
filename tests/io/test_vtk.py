"""VTK image data: what is written, replaced and refused."""

from typing import Any

import numpy as np
import pytest
from image_files import read_image

import mpigrad as mg

GRIDS = {
    1: ((9,), (0.5,)),
    2: ((7, 5), (0.5, 0.25)),
    3: ((5, 4, 6), (0.5, 0.25, 2.0)),
}


def fields_of(shape):
    """Fields of the whole grid."""
    ids = np.arange(np.prod(shape)).reshape(shape)
    return {
        "float64": ids / 7,
        "a <b> & \"ç'": (ids / 7).astype(np.float32),
        "plane": np.stack([ids, -ids], axis=-1) / 3,
        "space": np.stack([ids, -ids, 2 * ids], axis=-1).astype(np.float32),
        "bool": ids % 3 == 0,
        "int64": ids,
    }


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("at", ["cells", "points"])
@pytest.mark.parametrize("ndim", GRIDS)
def test_pieces_are_the_whole_fields(comm, directory, ndim, at):
    grid = mg.Grid(*GRIDS[ndim], comm)
    whole = fields_of(grid.shape)
    path = directory / "u.pvti"
    mg.io.write_vtk(path, grid, {name: field[grid.slices] for name, field in whole.items()}, at=at)
    found = read_image(path, ndim)
    assert list(found) == list(whole)
    whole["plane"] = np.concatenate([whole["plane"], np.zeros((*grid.shape, 1))], axis=-1)
    for name, field in whole.items():
        assert found[name].dtype == (np.uint8 if field.dtype == bool else field.dtype)
        assert np.array_equal(found[name], field), name


def test_origin_and_spacing(comm, directory):
    grid = mg.Grid((4, 6), (0.5, 0.25), comm)
    field = {"u": np.zeros(grid.local_shape)}
    mg.io.write_vtk(directory / "cells.pvti", grid, field, origin=(10, 1 / 3))
    mg.io.write_vtk(directory / "points.pvti", grid, field, origin=(10, 1 / 3), at="points")
    cells, points = ((directory / f"{at}.pvti").read_text() for at in ("cells", "points"))
    assert 'WholeExtent="0 4 0 6 0 0"' in cells
    assert f'Origin="10.0 {1 / 3!r} 0.0" Spacing="0.5 0.25 1.0"' in cells
    assert 'WholeExtent="0 3 0 5 0 0"' in points
    assert f'Origin="10.25 {1 / 3 + 0.125!r} 0.0" Spacing="0.5 0.25 1.0"' in points


def test_files_are_replaced_and_others_stay(comm, directory):
    grid = mg.Grid((6, 4), (1.0, 1.0), comm)
    path = directory / "u.pvti"
    if comm.rank == 0:
        for name in ("u", "u.pieces-", "u.pieces-old", "uu.pieces-0"):
            (directory / name).mkdir()
        (directory / "u.pieces-7").mkdir()  # of a job that was killed
    comm.mpi.Barrier()
    for value in range(3):
        mg.io.write_vtk(path, grid, {"u": np.full(grid.local_shape, value)})
        assert np.all(read_image(path, 2)["u"] == value)
    comm.mpi.Barrier()
    left = {entry.name for entry in directory.iterdir()}
    assert left == {"u", "u.pieces-", "u.pieces-old", "uu.pieces-0", "u.pvti", "u.pieces-0"}
    assert len(list((directory / "u.pieces-0").iterdir())) == comm.size


def test_a_failed_write_leaves_the_old_files(comm, directory):
    grid = mg.Grid((6, 4), (1.0, 1.0), comm)
    path = directory / "u.pvti"
    if comm.rank == 0:
        path.mkdir()  # the index cannot be renamed to it
    comm.mpi.Barrier()
    with pytest.raises(OSError, match=r"u\.pvti"):
        mg.io.write_vtk(path, grid, {"u": np.zeros(grid.local_shape)})
    comm.mpi.Barrier()
    assert [entry.name for entry in directory.iterdir()] == ["u.pvti"]


def test_rejects_invalid_input_before_anything_is_written(comm, directory):
    grid = mg.Grid((6, 4), (1.0, 1.0), comm)
    u = np.zeros(grid.local_shape)
    last = comm.rank == comm.size - 1

    def rejects(error, message, fields, path="u.pvti", **options):
        with pytest.raises(error, match=message):
            mg.io.write_vtk(directory / path, grid, fields, **options)

    halo = np.zeros([n + 2 for n in grid.local_shape])
    rejects(ValueError, rf"'u' on rank {comm.size - 1}\..*halos", {"u": halo if last else u})
    rejects(ValueError, "axis of components", {"u": u[..., None, None]})
    rejects(TypeError, "complex128 for 'u' on rank .*two fields", {"u": u * (1j if last else 1)})
    rejects(TypeError, "float16.*Convert", {"u": u.astype(np.float16)})
    rejects(TypeError, "expected a dict of fields", [u])
    rejects(TypeError, "expected str names", {3: u})
    for name in ("", "a/b", "a\nb", " a", ".a", "__a", "\udcff", "a" * 201):
        rejects(ValueError, "is not a valid name", {name: u})
    rejects(ValueError, "ends with .pvti", {"u": u}, path="u.vti")
    rejects(ValueError, "printable", {"u": u}, path="a\nb.pvti")
    rejects(FileNotFoundError, "none of .* does not exist", {"u": u}, path="none/u.pvti")
    rejects(ValueError, "at='points'", {"u": u}, at="faces")
    rejects(ValueError, "2 finite coordinates", {"u": u}, origin=(0.0, np.inf))
    rejects(ValueError, "2 finite coordinates", {"u": u}, origin=("a", "b"))
    if comm.size > 1:
        rejects(ValueError, "names, dtypes .* same on all ranks", {"v" if last else "u": u})
        rejects(ValueError, "path must be the same", {"u": u}, path=f"{comm.rank}.pvti")
    comm.mpi.Barrier()
    assert not list(directory.iterdir())


def test_index_of_times(comm, directory):
    grid = mg.Grid((6, 4), (1.0, 1.0), comm)
    if comm.rank == 0:
        (directory / "parts").mkdir()
    comm.mpi.Barrier()
    files = {}
    for time in (0.0, 0.1):
        files[time] = directory / "parts" / f"u_{10 * time:.0f}.pvti"
        mg.io.write_vtk(files[time], grid, {"u": np.full(grid.local_shape, time)})
        mg.io.write_pvd(directory / "u.pvd", files, comm)
    lines = (directory / "u.pvd").read_text().splitlines()
    assert lines[3:5] == [
        '<DataSet timestep="0.0" file="parts/u_0.pvti"/>',
        '<DataSet timestep="0.1" file="parts/u_1.pvti"/>',
    ]
    with pytest.raises(FileNotFoundError, match=r"none does not exist"):
        mg.io.write_pvd(directory / "v.pvd", {0.0: directory / "none"}, comm)
    with pytest.raises(ValueError, match="finite numbers as times, got nan"):
        mg.io.write_pvd(directory / "v.pvd", {np.nan: files[0.0]}, comm)
    wrong: list[Any] = [{"0": files[0.0]}, [files[0.0]]]
    with pytest.raises(ValueError, match="finite numbers as times, got '0'"):
        mg.io.write_pvd(directory / "v.pvd", wrong[0], comm)
    with pytest.raises(TypeError, match="dict of files by time, got list"):
        mg.io.write_pvd(directory / "v.pvd", wrong[1], comm)
    comm.mpi.Barrier()
    assert not (directory / "v.pvd").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cells": [[0, 1, 5]]}, "cells must have nodes from 0 to 2, .* got 0 to 5"),
        ({"cells": [[0, 1, -1]]}, "cells must have nodes from 0 to 2"),
        ({"cells": [[0, 1]]}, "cells of VTK's type 5 have 3 nodes, got 2"),
        ({"cells": [[0.0, 1.0, 2.0]]}, "expected cells as integers"),
        ({"cells": [0, 1, 2]}, "expected cells as integers of shape"),
        ({"points": np.zeros(3)}, "expected points as real numbers of shape"),
        ({"cell_type": 999}, "cell_type must be VTK's number of a type, 1 to 255, got 999"),
        ({"cell_type": "triangle"}, "cell_type must be VTK's number of a type"),
    ],
)
def test_cells_that_do_not_fit_are_an_error_on_all_ranks(directory, comm, changed, message):
    """One rank alone has them, and nothing is written."""
    good = {"points": np.eye(3), "cells": [[0, 1, 2]], "cell_type": 5}
    bad = {**good, **changed} if comm.rank == comm.size - 1 else good
    with pytest.raises(ValueError, match=f"write_vtu: {message}"):
        mg.io.write_vtu(directory / "u.pvtu", **bad, comm=comm)
    comm.mpi.barrier()
    assert not list(directory.iterdir())


@pytest.mark.ranks(2)
def test_types_of_cells_differ_between_ranks(directory, comm):
    cells = np.arange(3)[None]
    with pytest.raises(ValueError, match="write_vtu: cell_type must be the same on all ranks"):
        mg.io.write_vtu(directory / "u.pvtu", np.eye(3), cells, (5, 7)[comm.rank], comm=comm)
