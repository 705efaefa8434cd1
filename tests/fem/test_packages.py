"""Missing packages of the extra `fem`."""

import sys

import numpy as np
import pytest

from mpigrad import fem
from mpigrad.fem.cells import reference_cell
from mpigrad.fem.distribute import bisect_coordinates, partition_cells

pytest.importorskip("basix", reason="of the extra fem")
pytestmark = pytest.mark.ranks(1)
SQUARE = np.array([[0.0, 0], [1, 0], [0, 1], [1, 1]]), np.array([[0, 1, 2], [1, 3, 2]])


def test_errors_say_how_to_install(monkeypatch, directory):
    monkeypatch.setitem(sys.modules, "basix", None)
    reference_cell.cache_clear()
    with pytest.raises(ImportError, match=r"package fenics-basix, .* pip install mpigrad\[fem\]"):
        fem.box((2, 2), (1.0, 1.0))
    monkeypatch.setitem(sys.modules, "meshio", None)
    with pytest.raises(ImportError, match=r"fem\.read_mesh: .* package meshio, .* mpigrad\[fem\]"):
        fem.read_mesh(directory / "m.msh")


def test_metis_is_optional(monkeypatch):
    pytest.importorskip("pymetis")
    parts, method = partition_cells(*SQUARE, "triangle", 2)
    assert sorted(parts) == [0, 1]
    assert method == "metis"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert partition_cells(*SQUARE, "triangle", 2)[1] == "coordinates"
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ImportError, match=r"partition='metis'\): expected the package pymetis"):
        partition_cells(*SQUARE, "triangle", 2, "metis", "fem.read_mesh")


@pytest.mark.parametrize("n_parts", [1, 2, 3, 5, 7, 16, 23, 60])
def test_bisection_gives_equal_parts(n_parts):
    centers = np.random.default_rng(0).uniform(size=(60, 3))
    parts = bisect_coordinates(centers, n_parts)
    counts = np.bincount(parts, minlength=n_parts)
    assert len(counts) == n_parts
    assert counts.max() - counts.min() <= 2
    assert counts.min() > 0


@pytest.mark.parametrize("kind", ["triangle", "quadrilateral", "tetrahedron", "hexahedron"])
def test_tables_of_reference_cells(kind):
    cell = reference_cell(kind)
    # VTK's corners go around: each edge of a quadrilateral has two neighbours there.
    vtk = cell.points[list(cell.names.vtk_order)]
    if not cell.is_simplex:
        ring = np.roll(vtk[:4], -1, axis=0) - vtk[:4]
        assert (np.abs(ring).sum(axis=1) == 1).all()
    # In a mirror the cell has the same facets, and the other orientation.
    facets = {frozenset(facet) for facet in cell.facets.tolist()}
    mirror = np.array(cell.names.mirror)
    assert {frozenset(mirror[facet].tolist()) for facet in cell.facets} == facets
    gradients = cell.shape_gradients(cell.points[:1])[0]
    assert np.isclose(np.linalg.det(gradients.T @ cell.points), 1)
    assert np.isclose(np.linalg.det(gradients.T @ cell.points[mirror]), -1)
