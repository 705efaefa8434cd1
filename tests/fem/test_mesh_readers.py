"""VTK reads the files of meshes."""

import numpy as np
import pytest
from mesh_cases import LENGTHS, SHAPES, mixed_up

from mpigrad import fem

pytest.importorskip("vtk", reason="make test-files installs vtk")
pytestmark = pytest.mark.ranks(1, 3)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("kind", list(SHAPES))
def test_vtk_reads_pieces_as_one_mesh(kind, degree, comm, alone, directory):
    """The class is the one that ParaView uses."""
    from vtkmodules.util.numpy_support import vtk_to_numpy
    from vtkmodules.vtkFiltersVerdict import vtkCellSizeFilter
    from vtkmodules.vtkIOXML import vtkXMLPUnstructuredGridReader

    mesh = fem.distribute_mesh(**mixed_up(kind, alone), comm=comm)
    space = fem.Space(mesh, degree)
    path = directory / "u.pvtu"
    function = lambda x: x[:, 0] ** 2 - x[:, 1]
    vectors = space.node_points[: space.nodes.n_local]
    space.write(path, u=space.interpolate(function), x=vectors, cells={"tag": mesh.cell_tags})
    reader = vtkXMLPUnstructuredGridReader()
    assert reader.CanReadFile(str(path))
    reader.SetFileName(str(path))
    reader.Update()
    assert reader.GetErrorCode() == 0
    grid = reader.GetOutput()
    assert grid.GetNumberOfCells() == mesh.n_cells_global
    points = vtk_to_numpy(grid.GetPoints().GetData())
    np.testing.assert_allclose(vtk_to_numpy(grid.GetPointData().GetArray("u")), function(points))
    np.testing.assert_array_equal(vtk_to_numpy(grid.GetPointData().GetArray("x")), points)
    assert set(vtk_to_numpy(grid.GetCellData().GetArray("tag"))) == {3, 5}
    sizes = vtkCellSizeFilter()
    sizes.SetInputData(grid)
    sizes.Update()
    name = "Area" if mesh.dim == 2 else "Volume"
    volume = vtk_to_numpy(sizes.GetOutput().GetCellData().GetArray(name)).sum()
    np.testing.assert_allclose(volume, np.prod(LENGTHS[mesh.dim]))
