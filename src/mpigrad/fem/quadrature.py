"""Quadrature rules on reference cells, and tables of basis functions at their points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad.fem.packages import import_package
from mpigrad.fem.reference import lagrange_element, reference_cell

__all__ = ["FacetRule", "Rule", "cell_rule", "facet_rule", "tabulate"]


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
