"""Zarr groups with labelled axes: what is written, replaced and refused."""

import numpy as np
import pytest
import zarr

import mpigrad as mg


@pytest.mark.parametrize("shape", [(12, 12), (13, 7), (5, 11)], ids=str)
def test_fields_are_written_without_being_gathered(comm, directory, shape):
    grid = mg.Grid(shape, (0.5, 0.25), comm)
    whole = np.random.default_rng(0).normal(size=shape)
    fields = {"a": whole[grid.slices], "b": grid.natural_ids()}
    path = directory / "fields.zarr"
    for _ in range(2):  # the second time, it replaces the first
        mg.io.write_zarr(path, grid, fields, {"about": "a test"})
    group = zarr.open_group(path, mode="r")
    assert group.attrs["about"] == "a test"
    assert group.metadata.zarr_format == 3
    assert np.array_equal(group["a"][:], whole)
    assert np.array_equal(group["b"][:], np.arange(grid.size).reshape(shape))
    assert np.array_equal(group["y"][:], (np.arange(shape[1]) + 0.5) * 0.25)
    # a chunk is a tile if the tiles are even, and there is at most one chunk for each rank
    assert group["a"].chunks == tuple(-(-n // p) for n, p in zip(shape, grid.dims, strict=True))
    assert group["a"].nchunks <= comm.size
    comm.mpi.Barrier()
    assert [entry.name for entry in directory.iterdir()] == ["fields.zarr"]


@pytest.mark.ranks(1, 2, 3, 4)
def test_axes_units_and_snapshots(comm, directory):
    shape = (5, 4, 6)
    grid = mg.Grid(shape, (0.5, 0.25, 2.0), comm)
    flow = np.random.default_rng(0).normal(size=(*shape, 2)).astype(np.float32)
    times = {0.0: 1.0, 0.1: 2.0, 0.7: 3.0}
    mg.io.write_zarr(
        directory / "u.zarr",
        grid,
        {"mask": grid.natural_ids() % 2 == 0},
        snapshots={time: {"flow": k * flow[grid.slices]} for time, k in times.items()},
        units={"x": "m", "time": "s", "flow": "m/s"},
        origin=(10.0, 0.0, 0.0),
    )
    group = zarr.open_group(directory / "u.zarr", mode="r")
    assert group["flow"].metadata.dimension_names == ("time", "x", "y", "z", "flow_component")
    assert group["mask"].metadata.dimension_names == ("x", "y", "z")
    assert group["mask"].dtype == bool
    for time, k in enumerate(times.values()):
        assert np.array_equal(group["flow"][time], k * flow)
    assert np.array_equal(group["time"][:], list(times))
    assert np.array_equal(group["x"][:], 10 + 0.5 * (np.arange(5) + 0.5))
    units = {name: array.attrs.get("units") for name, array in group.arrays()}
    assert units == {"x": "m", "y": None, "z": None, "time": "s", "flow": "m/s", "mask": None}


def test_rejects_invalid_input_before_anything_is_written(comm, directory):
    grid = mg.Grid((6, 4), (1.0, 1.0), comm)
    u = np.zeros(grid.local_shape)
    last = comm.rank == comm.size - 1

    def rejects(error, message, fields, path="u.zarr", **options):
        with pytest.raises(error, match=message):
            mg.io.write_zarr(directory / path, grid, fields, **options)

    rejects(ValueError, f"'u' on rank {comm.size - 1}", {"u": u[1:] if last else u})
    rejects(TypeError, "complex64", {"u": u.astype(np.complex64)})
    vector = np.stack([u, u], -1)
    rejects(ValueError, "two arrays or axes 'x'", {"x": u})
    rejects(ValueError, "two arrays or axes 'u'", {"u": u}, snapshots={0.0: {"u": u}})
    rejects(ValueError, "two arrays or axes 'time'", {"time": u}, snapshots={0.0: {"u": u}})
    rejects(ValueError, "two arrays or axes 'v_component'", {"v": vector, "v_component": u})
    rejects(ValueError, "name of a file of the group", {"zarr.json": u})
    rejects(TypeError, "dict of snapshots by time, got list", {}, snapshots=[{"u": u}])
    if comm.size > 1:
        some = {0.0: {"u": u}} if last else None
        rejects(ValueError, "number of snapshots must be the same on all", {}, snapshots=some)
    rejects(ValueError, "units of x, y, u, got 'm' for 'v'", {"u": u}, units={"v": "m"})
    rejects(ValueError, "finite times", {}, snapshots={np.nan: {"u": u}})
    rejects(ValueError, "same fields.* at time 1", {}, snapshots={0.0: {"u": u}, 1.0: {"v": u}})
    rejects(ValueError, "same fields", {}, snapshots={0.0: {"u": u}, 1.0: {"u": u > 0}})
    rejects(ValueError, r"ends with \.zarr", {"u": u}, path="u")
    rejects(FileNotFoundError, "none of .* does not exist", {"u": u}, path="none/u.zarr")
    comm.mpi.Barrier()
    assert not list(directory.iterdir())


def test_replaces_nothing_but_groups(comm, directory):
    grid = mg.Grid((6, 4), (1.0, 1.0), comm)
    if comm.rank == 0:
        (directory / "u.zarr").mkdir()
        (directory / "u.zarr" / "thesis.tex").touch()
    comm.mpi.Barrier()
    with pytest.raises(FileExistsError, match="not a zarr group"):
        mg.io.write_zarr(directory / "u.zarr", grid, {"u": np.zeros(grid.local_shape)})
    assert (directory / "u.zarr" / "thesis.tex").exists()


def test_a_failed_write_leaves_the_old_group(comm, directory):
    grid = mg.Grid((6, 4), (1.0, 1.0), comm)
    u = np.ones(grid.local_shape)
    mg.io.write_zarr(directory / "u.zarr", grid, {"u": u})
    with pytest.raises(TypeError, match="JSON"):
        mg.io.write_zarr(directory / "u.zarr", grid, {"u": 2 * u}, {"about": object()})
    comm.mpi.Barrier()
    assert [entry.name for entry in directory.iterdir()] == ["u.zarr"]
    assert np.all(zarr.open_group(directory / "u.zarr", mode="r")["u"][:] == 1)
