"""Reference cells, quadrature rules on them, and tables of basis functions."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CELL_TYPES",
    "FacetRule",
    "ReferenceCell",
    "Rule",
    "cell_rule",
    "check_cell_type",
    "facet_rule",
    "import_package",
    "lagrange_element",
    "reference_cell",
    "tabulate",
]

# ---- Import the packages of the extra `fem`, with an error that says how to install them ----


# The names of the distributions, if they differ from the names of the modules.
_DISTRIBUTIONS = {"basix": "fenics-basix"}


def import_package(name: str, function: str) -> Any:
    """Return an imported package.

    Parameters
    ----------
    name
        The name of the module.
    function
        The public function that needs it, for the error.

    Raises
    ------
    ImportError
        If the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        distribution = _DISTRIBUTIONS.get(name, name)
        raise ImportError(
            f"{function}: expected the package {distribution}, got none ({error}). Install it with "
            "pip install mpigrad[fem]."
        ) from error


# ---- Reference cells: their corners, edges, faces and facets in the order of basix ----


@dataclass(frozen=True)
class _Names:
    """Names of a cell type elsewhere, and orders of its corners."""

    meshio: str
    facet: str  # of meshio
    vtk: int
    # Corner i of VTK (and of gmsh and meshio) is corner vtk_order[i] of basix.
    vtk_order: tuple[int, ...]
    # The same cell seen in a mirror, which has a Jacobian of the other sign.
    mirror: tuple[int, ...]


CELL_TYPES = {
    "triangle": _Names("triangle", "line", 5, (0, 1, 2), (0, 2, 1)),
    "quadrilateral": _Names("quad", "line", 9, (0, 1, 3, 2), (0, 2, 1, 3)),
    "tetrahedron": _Names("tetra", "triangle", 10, (0, 1, 2, 3), (0, 1, 3, 2)),
    "hexahedron": _Names(
        "hexahedron", "quad", 12, (0, 1, 3, 2, 4, 5, 7, 6), (0, 2, 1, 3, 4, 6, 5, 7)
    ),
}


@dataclass(frozen=True, eq=False)
class ReferenceCell:
    """A reference cell of basix.

    Attributes
    ----------
    name
        The name of its type.
    dim
        2 or 3.
    points
        Coordinates of its corners, shape (n_corners, dim).
    entities
        For each dimension from 0 to dim the corners of its vertices, edges, faces and interior:
        arrays of shape (number of entities, corners of an entity).
    names
        Names in meshio and VTK, and the orders of corners there.
    """

    name: str
    dim: int
    points: NDArray[np.float64]
    entities: tuple[NDArray[np.intp], ...]
    names: _Names

    @property
    def n_corners(self) -> int:
        """The number of its corners."""
        return len(self.points)

    @property
    def is_simplex(self) -> bool:
        """True for triangles and tetrahedra, whose geometry is affine."""
        return self.n_corners == self.dim + 1

    @property
    def facets(self) -> NDArray[np.intp]:
        """The corners of its facets, shape (n_facets, corners of a facet)."""
        return self.entities[self.dim - 1]

    def shape_gradients(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gradients of the linear shape functions: (points, n_corners, dim)."""
        table = self._element.tabulate(1, np.ascontiguousarray(points))[1:, :, :, 0]
        return np.moveaxis(table, 0, -1)

    def shape_values(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the values of the linear shape functions: (points, n_corners)."""
        return self._element.tabulate(0, np.ascontiguousarray(points))[0, :, :, 0]

    @property
    def _element(self) -> Any:
        return lagrange_element(self.name, 1)


def check_cell_type(function: str, name: object) -> str:
    """Return the name of a cell type, or raise an error."""
    if not isinstance(name, str) or name not in CELL_TYPES:
        raise ValueError(
            f"{function}: expected cell_type to be one of {', '.join(CELL_TYPES)}, got {name!r}. "
            "Choose one of them."
        )
    return name


@functools.cache
def reference_cell(name: str) -> ReferenceCell:
    """Return the reference cell of a type."""
    basix = import_package("basix", "fem.Mesh")
    kind = basix.CellType[name]
    topology = basix.topology(kind)
    return ReferenceCell(
        name=name,
        dim=len(topology) - 1,
        points=np.asarray(basix.geometry(kind), float),
        entities=tuple(np.asarray(entities, np.intp) for entities in topology),
        names=CELL_TYPES[name],
    )


def lagrange_element(name: str, degree: int) -> Any:
    """Return the Lagrange element of basix with equispaced nodes on a type of cells.

    It is made in each call. Objects of basix that are alive at the end of the program are reported
    as leaks by nanobind, so nothing here keeps one.
    """
    basix = import_package("basix", "fem.Space")
    return basix.create_element(
        basix.ElementFamily.P, basix.CellType[name], degree, basix.LagrangeVariant.equispaced
    )


# ---- Quadrature rules on reference cells, and tables of basis functions at their points ----


@dataclass(frozen=True, eq=False)
class Rule:
    """Points of a reference cell, shape (q, dim), and their weights, shape (q,)."""

    points: NDArray[np.float64]
    weights: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class FacetRule:
    """Points on each facet of a reference cell, in its coordinates.

    Attributes
    ----------
    points
        Shape (n_facets, q, dim).
    weights
        Of the reference facet, shape (q,).
    tangents
        The derivatives of the points in the coordinates of the reference facet, shape (n_facets,
        dim, dim - 1).
    normals
        The outward normals, shape (n_facets, dim).
    """

    points: NDArray[np.float64]
    weights: NDArray[np.float64]
    tangents: NDArray[np.float64]
    normals: NDArray[np.float64]


def cell_rule(cell_type: str, degree: int) -> Rule:
    """Return the default rule of basix that is exact for polynomials of a degree."""
    basix = import_package("basix", "fem.Energy")
    points, weights = basix.make_quadrature(basix.CellType[cell_type], degree)
    return Rule(np.asarray(points), np.asarray(weights))


def facet_rule(cell_type: str, degree: int) -> FacetRule:
    """Return the rule of the reference facet on each facet of a cell."""
    basix = import_package("basix", "fem.Energy")
    cell = reference_cell(cell_type)
    kind = basix.CellType[cell_type]
    facet = basix.cell.subentity_types(kind)[cell.dim - 1][0]
    places, weights = basix.make_quadrature(facet, degree)
    corners = cell.points[cell.facets]  # (n_facets, corners, dim)
    tangents = np.moveaxis(corners[:, 1 : cell.dim] - corners[:, :1], 1, 2)
    points = corners[:, :1] + np.einsum("fdk,qk->fqd", tangents, np.asarray(places))
    normals = np.asarray(basix.cell.facet_outward_normals(kind))
    return FacetRule(points, np.asarray(weights), tangents, normals)


def tabulate(
    cell_type: str, degree: int, points: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return values (..., n_basis) and gradients (..., n_basis, dim) of the Lagrange basis."""
    flat = np.ascontiguousarray(points.reshape(-1, points.shape[-1]))
    table: Any = lagrange_element(cell_type, degree).tabulate(1, flat)[..., 0]
    table = table.reshape(len(table), *points.shape[:-1], -1)
    return np.ascontiguousarray(table[0]), np.ascontiguousarray(np.moveaxis(table[1:], 0, -1))
