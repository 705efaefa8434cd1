"""Reports, pictures, and fields written by all ranks."""

import numpy as np
import pytest
import zarr

from mpigrad.grid import Grid
from mpigrad_apps.report import (
    Panel,
    Table,
    curve,
    maps,
    points,
    versions,
    write_fields,
    write_report,
)


@pytest.fixture
def directory(tmp_path, comm):
    return comm.mpi.bcast(tmp_path)


@pytest.mark.parametrize("shape", [(12, 12), (13, 7), (5, 11)], ids=str)
def test_fields_are_written_without_being_gathered(comm, directory, shape):
    grid = Grid(shape, (0.5, 0.25), comm)
    whole = np.random.default_rng(0).normal(size=shape)
    fields = {"a": whole[grid.slices], "b": grid.natural_ids()}
    for _ in range(2):  # the second time, it replaces the first
        write_fields(directory / "fields.zarr", grid, fields, {"unit": "m"})
    group = zarr.open_group(directory / "fields.zarr", mode="r")
    assert group.attrs["unit"] == "m"
    assert group.metadata.zarr_format == 3
    assert np.array_equal(group["a"][:], whole)
    assert np.array_equal(group["b"][:], np.arange(grid.size).reshape(shape))
    assert np.array_equal(group["y"][:], (np.arange(shape[1]) + 0.5) * 0.25)
    # a chunk is a tile if the tiles are even, and there is at most one chunk for each rank
    assert group["a"].chunks == tuple(-(-n // p) for n, p in zip(shape, grid.dims, strict=True))
    assert group["a"].nchunks <= comm.size


def test_a_place_that_cannot_be_written_is_an_error_on_every_rank(comm, directory):
    grid = Grid((4, 4), (1.0, 1.0), comm)
    if comm.rank == 0:
        (directory / "file").touch()
    comm.mpi.Barrier()
    with pytest.raises(OSError):
        write_fields(directory / "file" / "fields.zarr", grid, {"a": np.zeros(grid.local_shape)})


def test_report_holds_its_pictures_and_escapes_text(tmp_path):
    values = np.arange(12.0).reshape(4, 3)
    values[0, 0] = np.nan
    pictures = [
        maps("map", "a < b & c", [Panel("one", values), Panel("two", values, diverging=True)]),
        curve("curve", "down", {"loss": ([0, 1, 2], [1.0, 0.1, 0.01])}),
        points("points", "here", "u", np.random.default_rng(0).random((5, 2)), np.arange(5.0)),
    ]
    path = write_report(
        tmp_path / "new", "T & U", "all <well>", pictures, [Table("Numbers", {"<n>": 3})]
    )
    page = path.read_text()
    assert path.name == "report.html"
    for text in ("T &amp; U", "all &lt;well&gt;", "a &lt; b &amp; c", "&lt;n&gt;", "<td>3</td>"):
        assert text in page
    assert page.count('<img src="data:image/png;base64,') == 3
    assert "http" not in page  # nothing is loaded from elsewhere
    for name in ("map", "curve", "points"):
        assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_versions_name_what_computed():
    found = versions()
    assert {"mpigrad", "Python", "JAX", "mpi4py", "MPI", "hypre"} <= set(found)
    assert all(str(value).strip() for value in found.values())
