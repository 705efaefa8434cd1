"""VTK, PyVista, xarray and NetCDF read the files."""

import numpy as np
import pytest
from test_vtk import GRIDS, fields_of

import mpigrad as mg

pytest.importorskip("vtk", reason="make test-files installs vtk, pyvista, xarray and netCDF4")
pytestmark = pytest.mark.ranks(1, 2, 3, 4)
SHAPES = [*(shape for shape, _ in GRIDS.values()), (4, 1), (4, 4)]  # tiles with one cell, too


@pytest.mark.parametrize("at", ["cells", "points"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_vtk_reads_pieces_as_one_image(comm, directory, shape, at):
    """The class is the one that ParaView uses."""
    from vtkmodules.util.numpy_support import vtk_to_numpy
    from vtkmodules.vtkIOXML import vtkXMLPImageDataReader

    ndim, spacing = len(shape), (0.5, 0.25, 2.0)[: len(shape)]
    grid = mg.Grid(shape, spacing, comm)
    whole = fields_of(shape)
    tiles = {name: field[grid.slices] for name, field in whole.items()}
    path = directory / "u.pvti"
    mg.io.write_vtk(path, grid, tiles, at=at, origin=(1.0, 2.0, 3.0)[:ndim])
    reader = vtkXMLPImageDataReader()
    assert reader.CanReadFile(str(path))
    reader.SetFileName(str(path))
    reader.Update()
    assert reader.GetErrorCode() == 0
    image = reader.GetOutput()
    data = image.GetCellData() if at == "cells" else image.GetPointData()
    assert data.GetNumberOfArrays() == len(whole)
    for name, field in whole.items():
        values = vtk_to_numpy(data.GetArray(name))
        rest = values.shape[1:]
        found = values.reshape(*reversed(shape), *rest)
        found = found.transpose(*reversed(range(ndim)), *range(ndim, found.ndim))
        assert found.dtype == (np.uint8 if field.dtype == bool else field.dtype)
        if name == "plane":
            assert np.all(found[..., 2] == 0)
            found = found[..., :2]
        assert np.array_equal(found, field), name
    points = [n + (at == "cells") for n in shape]
    assert image.GetDimensions() == (*points, *[1] * (3 - ndim))
    shift = 0.0 if at == "cells" else 0.5
    assert image.GetOrigin()[:ndim] == tuple(1 + i + shift * h for i, h in enumerate(spacing))
    assert image.GetSpacing()[:ndim] == spacing


def test_pyvista_reads_the_times(comm, directory):
    import pyvista

    grid = mg.Grid((6, 4), (1.0, 1.0), comm)
    files = {}
    for time in (0.0, 0.25, 1.5):
        files[time] = directory / f"u_{time}.pvti"
        mg.io.write_vtk(files[time], grid, {"u": grid.natural_ids() + time})
    mg.io.write_pvd(directory / "u.pvd", files, comm)
    reader = pyvista.get_reader(str(directory / "u.pvd"))
    assert reader.time_values == [0.0, 0.25, 1.5]
    for time in reader.time_values:
        reader.set_active_time_value(time)
        found = reader.read()[0].cell_data["u"].reshape(4, 6).T
        assert np.array_equal(found, np.arange(24).reshape(6, 4) + time)


@pytest.mark.filterwarnings("error")  # xarray warns of groups that are slow to open
def test_xarray_reads_groups_and_writes_netcdf(comm, directory):
    import xarray

    grid = mg.Grid((7, 5), (10.0, 20.0), comm)
    whole = fields_of(grid.shape)
    tiles = {name: field[grid.slices] for name, field in whole.items()}
    mg.io.write_zarr(
        directory / "u.zarr",
        grid,
        tiles,
        {"about": "a test"},
        snapshots={time: {"p": tiles["float64"] + time} for time in (0.0, 0.5)},
        units={"x": "m", "y": "m", "time": "s", "p": "Pa"},
    )
    if comm.rank == 0:
        xarray.open_zarr(directory / "u.zarr").to_netcdf(directory / "u.nc")
    comm.mpi.Barrier()
    for read in (
        xarray.open_zarr(directory / "u.zarr"),
        xarray.open_dataset(directory / "u.nc"),
    ):
        with read as data:
            assert data.attrs == {"about": "a test"}
            for name, field in whole.items():
                assert np.array_equal(data[name].values, field)
                assert data[name].dims[:2] == ("x", "y")
            late = data["p"].sel(time=0.5)
            assert late.attrs["units"] == "Pa"
            assert late.x.attrs["units"] == "m"
            assert float(late.sel(x=35.0, y=50.0)) == whole["float64"][3, 2] + 0.5
