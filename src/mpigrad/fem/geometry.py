"""The maps from reference cells and facets to those of a mesh."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpigrad.fem.mesh import Facets, Mesh
from mpigrad.fem.quadrature import FacetRule, Rule, tabulate
from mpigrad.fem.reference import reference_cell
from mpigrad.operations.kept_array import KeptArray

__all__ = ["CellGeometry", "FacetGeometry", "cell_geometry", "facet_geometry"]

_CHUNK = 1 << 16  # cells whose intermediate arrays are in memory at one time


@dataclass(frozen=True, eq=False)
class CellGeometry:
    """The Jacobians of cells at the points of a rule.

    Attributes
    ----------
    inverses
        The inverse Jacobians ∂ξ_j/∂x_i, shape (n, q, j, i). n is 1 if the cells differ by
        translations only, q is 1 if the maps are affine.
    determinants
        Shape (n, q).
    corners
        Coordinates of the corners of each cell, shape (n_cells, n_corners, dim).
    shape_values
        The linear shape functions at the points, shape (q, n_corners).
    """

    inverses: KeptArray
    determinants: KeptArray
    corners: KeptArray
    shape_values: NDArray[np.float64]


def cell_geometry(mesh: Mesh, rule: Rule) -> CellGeometry:
    """Compute the Jacobians of all cells of this rank."""
    cell = reference_cell(mesh.cell_type)
    corners = mesh.points[mesh.cells]
    values, gradients = tabulate(mesh.cell_type, 1, rule.points)
    # Coordinates are known up to this error.
    rounding = 8 * np.finfo(float).eps * np.abs(mesh.points).max(initial=0)
    used, places = corners, gradients
    if len(corners) and np.all(_affine_error(corners, cell.points) <= rounding):
        places = gradients[:1]
        edges = corners - corners[:, :1]
        if np.all(np.abs(edges - edges[:1]) <= rounding):
            used = corners[:1]
    n, q, dim = len(used), len(places), mesh.dim
    inverses, determinants = np.empty((n, q, dim, dim)), np.empty((n, q))
    for first in range(0, n, _CHUNK):
        chunk = slice(first, first + _CHUNK)
        jacobians = np.einsum("qkj,eki->eqij", places, used[chunk], optimize=True)
        determinants[chunk], inverses[chunk] = _invert(jacobians)
    return CellGeometry(KeptArray(inverses), KeptArray(determinants), KeptArray(corners), values)


@dataclass(frozen=True, eq=False)
class FacetGeometry:
    """Facets at the points of a rule.

    Attributes
    ----------
    weights
        Weights times the change of area, shape (n_facets, q).
    points, normals
        Coordinates and outward unit normals, shape (n_facets, q, dim).
    inverses
        The inverse Jacobians of the cells, shape (n_facets, q, j, i).
    """

    weights: NDArray[np.float64]
    points: NDArray[np.float64]
    normals: NDArray[np.float64]
    inverses: NDArray[np.float64]


def facet_geometry(facets: Facets, rule: FacetRule) -> FacetGeometry:
    """Compute areas, normals and Jacobians on a set of facets."""
    mesh, local = facets.mesh, facets.local_facets
    corners = mesh.points[mesh.cells[facets.cells]]
    values, gradients = tabulate(mesh.cell_type, 1, rule.points)
    jacobians = np.einsum("eqkj,eki->eqij", gradients[local], corners, optimize=True)
    _, inverses = _invert(jacobians)
    tangents = np.einsum("eqij,ejk->eqik", jacobians, rule.tangents[local])
    if mesh.dim == 2:
        areas = np.linalg.norm(tangents[..., 0], axis=-1)
    else:
        areas = np.linalg.norm(np.cross(tangents[..., 0], tangents[..., 1]), axis=-1)
    normals = np.einsum("eqji,ej->eqi", inverses, rule.normals[local])
    normals /= np.linalg.norm(normals, axis=-1, keepdims=True)
    points = np.einsum("eqk,ekd->eqd", values[local], corners)
    return FacetGeometry(areas * rule.weights, points, normals, inverses)


def _affine_error(
    corners: NDArray[np.float64], reference: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return how far each corner is from the affine map of the first corner and its edges."""
    axes = [
        int(np.flatnonzero((reference == unit).all(axis=1))[0])
        for unit in np.eye(3)[: reference.shape[1], : reference.shape[1]]
    ]
    edges = corners[:, axes] - corners[:, :1]
    mapped = corners[:, :1] + np.einsum("kd,edi->eki", reference, edges)
    return np.abs(corners - mapped)


def _invert(
    jacobians: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the determinants (...) and the inverses (..., dim, dim) of small matrices."""
    a = np.moveaxis(jacobians, (-2, -1), (0, 1))
    if len(a) == 2:
        determinants = a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0]
        adjugate = np.array([[a[1, 1], -a[0, 1]], [-a[1, 0], a[0, 0]]])
    else:
        adjugate = np.empty_like(a)
        for i in range(3):
            for j in range(3):
                p, q, r, s = (j + 1) % 3, (j + 2) % 3, (i + 1) % 3, (i + 2) % 3
                adjugate[i, j] = a[p, r] * a[q, s] - a[p, s] * a[q, r]
        determinants = (a[0] * adjugate[:, 0]).sum(axis=0)
    return determinants, np.moveaxis(adjugate / determinants, (0, 1), (-2, -1))
