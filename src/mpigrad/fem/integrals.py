"""Sums over the quadrature points of cells and facets: fields, residuals and element matrices."""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mpigrad.extend import Activity, KeptArray, as_array, index_array, primitive, take
from mpigrad.fem.cells import FacetRule, Rule, cell_rule, facet_rule, reference_cell, tabulate
from mpigrad.fem.mesh import Facets, Mesh
from mpigrad.fem.space import Space
from mpigrad.fem.tracing import AtPoints
from mpigrad.sparse import Selection

__all__ = [
    "Blocks",
    "CellGeometry",
    "CellIntegral",
    "FacetGeometry",
    "FacetIntegral",
    "Integral",
    "cell_geometry",
    "cell_values",
    "facet_geometry",
    "sum_over_cells",
]

# ---- The maps from reference cells and facets to those of a mesh ----


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

    @property
    def is_uniform(self) -> bool:
        """True if one inverse Jacobian holds at all points of all cells of this rank."""
        return self.inverses.shape[:2] == (1, 1)


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


# ---- The values of a field at the nodes of each cell, and the sum of contributions of cells ----


def cell_values(space: Space, u: Any) -> jax.Array:
    """Return a field at the nodes of each cell, shape (n_cells, n_basis, components) (collective).

    It is linear and differentiable. Its adjoint is `sum_over_cells`.
    """
    u = as_array(u)
    if u.shape != space.shape:
        raise ValueError(
            f"fem: expected a field of shape {space.shape} on rank {space.mesh.comm.rank}, got "
            f"{u.shape}. Give one row for each own node of the space."
        )
    # The axis of one component is here in the leading axes, as the field may lack it.
    lead = (*space.cell_nodes.shape, *[1] * (2 - u.ndim))
    return _selection(space)(u, lead)


def sum_over_cells(space: Space, contributions: jax.Array) -> jax.Array:
    """Add up contributions (n_cells, n_basis, components) at the nodes (collective)."""
    return _selection(space).add_up(contributions, space.shape[1:])


def _selection(space: Space) -> Selection:
    return space.cached(
        "selection", lambda: Selection(space.nodes.exchange, space.cell_nodes.ravel())
    )


# ---- Sums over the quadrature points of cells and facets: fields, residuals and element
# matrices
#
# The gradient of basis function a in a cell is ∂N_a/∂x_i = Σ_j ∂N_a/∂ξ_j ∂ξ_j/∂x_i. In cells what
# an integrand returns is transformed to reference coordinates first, so that the sums over points
# and basis functions are products with one table for all cells.


@dataclass(frozen=True)
class Blocks:
    """The derivatives of the two parts of an integrand in the field and its gradient.

    Shapes at a point: value_value (c, C), value_gradient (c, C, k), gradient_value (c, i, C) and
    gradient_gradient (c, i, C, k). None is zero.
    """

    value_value: AtPoints | None
    value_gradient: AtPoints | None
    gradient_value: AtPoints | None
    gradient_gradient: AtPoints | None


class Integral(abc.ABC):
    """A set of cells or facets of this rank with a quadrature rule."""

    n: int  # cells or facets
    weights: np.ndarray  # of the points of the reference cell or facet, shape (q,)

    @abc.abstractmethod
    def coordinates(self, dtype: Any) -> AtPoints:
        """Return the coordinates of the points, shape (n, q, dim)."""

    @abc.abstractmethod
    def normals(self, dtype: Any) -> AtPoints | None:
        """Return the normals of facets, shape (n, q, dim). None in cells."""

    @abc.abstractmethod
    def field(self, space: Space, values: jax.Array) -> tuple[AtPoints, AtPoints]:
        """Return a field (n, q, c) and its gradient (n, q, c, dim) of its values in all cells."""

    @abc.abstractmethod
    def total(self, density: AtPoints) -> jax.Array:
        """Return the integral of a density over this rank's cells or facets."""

    @abc.abstractmethod
    def residual(
        self, space: Space, value: AtPoints | None, gradient: AtPoints | None
    ) -> jax.Array | None:
        """Return ∫ f0 N_a + f1 · ∇N_a for the functions of a space, shape (n, n_basis, c)."""

    @abc.abstractmethod
    def matrix(self, rows: Space, columns: Space, blocks: Blocks) -> jax.Array | None:
        """Return the element matrices of two spaces, shape (n, n_basis, c, n_columns, C)."""


class CellIntegral(Integral):
    """All cells of this rank, or those of a mask."""

    def __init__(self, mesh: Mesh, degree: int, mask: np.ndarray | None) -> None:
        self.mask, self.n = mask, mesh.n_cells
        self.degree = degree
        self.rule: Rule = mesh.cached(("rule", degree), lambda: cell_rule(mesh.cell_type, degree))
        self.geometry = mesh.cached(("geometry", degree), lambda: cell_geometry(mesh, self.rule))
        self.weights = self.rule.weights

    def coordinates(self, dtype: Any) -> AtPoints:
        table = jnp.asarray(self.geometry.shape_values, dtype)
        return AtPoints(jnp.einsum("qk,eki->eqi", table, self.geometry.corners(dtype)))

    def normals(self, dtype: Any) -> AtPoints | None:
        return None

    def tables(self, space: Space) -> tuple[np.ndarray, np.ndarray]:
        """Return values (q, n_basis) and reference gradients (q or 1, n_basis, dim).

        If all cells have the same inverse Jacobian, the gradients are those in the cells.
        """

        def make() -> tuple[np.ndarray, np.ndarray]:
            values, gradients = tabulate(space.mesh.cell_type, space.degree, self.rule.points)
            if np.ptp(gradients, axis=0).max() < 1e-12:
                gradients = gradients[:1]
            if self.geometry.is_uniform:
                gradients = gradients @ self.geometry.inverses.array[0, 0]
            return values, gradients

        return space.cached(("tables", self.degree), make)

    def field(self, space: Space, values: jax.Array) -> tuple[AtPoints, AtPoints]:
        dtype = values.dtype
        table, gradients = (jnp.asarray(t, dtype) for t in self.tables(space))
        u = jnp.einsum("qa,eac->eqc", table, values)
        along = jnp.einsum("qaj,eac->eqcj", gradients, values)
        if not self.geometry.is_uniform:
            along = _transform(along, self.geometry.inverses(dtype), adjoint=True)
        return AtPoints(u), AtPoints(along)

    def total(self, density: AtPoints) -> jax.Array:
        dtype = density.array.dtype
        values = self._weighted(density).array
        if values.shape[1] == 1:
            values = values * float(self.rule.weights.sum())
        else:
            values = values * jnp.asarray(self.rule.weights, dtype)
        return values.sum() * (1 if values.shape[0] == self.n else self.n)

    def residual(
        self, space: Space, value: AtPoints | None, gradient: AtPoints | None
    ) -> jax.Array | None:
        table, along = self.tables(space)
        parts = []
        if value is not None:
            f = self._weighted(value).array
            parts.append(jnp.einsum("eqc,qa->eac", f, self._table(table, f)))
        if gradient is not None:
            f = self._weighted(gradient).array
            f = self._to_reference(f, 3)
            parts.append(jnp.einsum("eqcj,qaj->eac", f, self._table(along, f)))
        return self._for_all_cells(parts)

    def matrix(self, rows: Space, columns: Space, blocks: Blocks) -> jax.Array | None:
        (table, along), (other, other_along) = self.tables(rows), self.tables(columns)
        by_axis, other_by_axis = along.swapaxes(1, 2), other_along.swapaxes(1, 2)
        b, parts = blocks, []
        if b.value_value is not None:
            h = self._weighted(b.value_value).array  # (e, q, c, C)
            both = table[:, :, None] * other[:, None, :]
            parts.append(self._products(h, both))
        if b.value_gradient is not None:
            h = self._weighted(b.value_gradient).array
            h = self._to_reference(h, 4)  # (e, q, c, C, l)
            both = table[:, None, :, None] * other_by_axis[:, :, None]
            parts.append(self._products(h, both))
        if b.gradient_value is not None:
            h = self._weighted(b.gradient_value).array
            h = self._to_reference(h, 3)  # (e, q, c, j, C)
            both = by_axis[:, :, :, None] * other[:, None, None]
            parts.append(self._products(h.swapaxes(3, 4), both))
        if b.gradient_gradient is not None:
            h = self._weighted(b.gradient_gradient).array
            h = self._to_reference(h, 3, 5)  # (e, q, c, j, C, l)
            both = by_axis[:, :, None, :, None] * other_by_axis[:, None, :, None, :]
            parts.append(self._products(h.swapaxes(3, 4), both))
        return self._for_all_cells(parts)

    def _products(self, h: jax.Array, both: np.ndarray) -> jax.Array:
        """Return Σ h (e, q, c, C, ...) both (q, ..., a, b): (e, a, c, b, C)."""
        e, (c, others), (n, m) = h.shape[0], h.shape[2:4], both.shape[-2:]
        table = self._table(both, h).reshape(-1, n * m)
        h = jnp.moveaxis(h, 1, 3).reshape(e * c * others, -1)
        sums = (h @ table).reshape(e, c, others, n, m)
        return sums.transpose(0, 3, 1, 4, 2)

    def _to_reference(self, f: jax.Array, *axes: int) -> jax.Array:
        """Replace axes of components along x_i by components along ξ_j: Σ_i f_i ∂ξ_j/∂x_i."""
        if self.geometry.is_uniform:  # the tables have the Jacobians
            return f
        inverses = self.geometry.inverses(f.dtype)
        for axis in axes:
            f = jnp.moveaxis(_transform(jnp.moveaxis(f, axis, -1), inverses), -1, axis)
        return f

    def _weighted(self, f: AtPoints) -> AtPoints:
        """Multiply with the determinants, and with zero outside of the mask."""
        determinants = self.geometry.determinants(f.array.dtype)
        if self.mask is not None:
            determinants = determinants * jnp.asarray(self.mask, f.array.dtype)[:, None]
        extra = f.array.ndim - 2
        return AtPoints(f.array * determinants.reshape(*determinants.shape, *[1] * extra))

    def _table(self, table: np.ndarray, f: jax.Array) -> jax.Array:
        """Return the table times the weights, added up if `f` is the same at all points."""
        weights = self.rule.weights.reshape(-1, *[1] * (table.ndim - 1))
        weighted = weights * table
        if f.shape[1] == 1:
            weighted = weighted.sum(axis=0, keepdims=True)
        return jnp.asarray(weighted, f.dtype)

    def _for_all_cells(self, parts: list[jax.Array]) -> jax.Array | None:
        if not parts:
            return None
        result = sum(parts[1:], parts[0])
        return jnp.broadcast_to(result, (self.n, *result.shape[1:]))


class FacetIntegral(Integral):
    """A set of facets. Basis functions are those of the cells that have the facets."""

    def __init__(self, degree: int, facets: Facets) -> None:
        mesh = facets.mesh
        self.n = facets.n_local
        self._rule = facet_rule(mesh.cell_type, degree)
        self.weights = self._rule.weights
        self._local = facets.local_facets
        geometry = facet_geometry(facets, self._rule)
        self._geometry = geometry
        self.cells = index_array(facets.cells)
        self._weights = KeptArray(geometry.weights)
        self._points = KeptArray(geometry.points)
        self._normals = KeptArray(geometry.normals)
        self._kept: dict[int, tuple[KeptArray, KeptArray]] = {}

    def coordinates(self, dtype: Any) -> AtPoints:
        return AtPoints(self._points(dtype))

    def normals(self, dtype: Any) -> AtPoints | None:
        return AtPoints(self._normals(dtype))

    def tables(self, space: Space, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Return values (n, q, n_basis) and gradients (n, q, n_basis, dim) on each facet."""
        if space.degree not in self._kept:
            values, along = tabulate(space.mesh.cell_type, space.degree, self._rule.points)
            gradients = np.einsum("eqaj,eqji->eqai", along[self._local], self._geometry.inverses)
            self._kept[space.degree] = KeptArray(values[self._local]), KeptArray(gradients)
        values, gradients = self._kept[space.degree]
        return values(dtype), gradients(dtype)

    def field(self, space: Space, values: jax.Array) -> tuple[AtPoints, AtPoints]:
        here = take(values, self.cells)
        table, gradients = self.tables(space, values.dtype)
        u = jnp.einsum("eqa,eac->eqc", table, here)
        return AtPoints(u), AtPoints(jnp.einsum("eqai,eac->eqci", gradients, here))

    def total(self, density: AtPoints) -> jax.Array:
        return (self._weighted(density)).sum()

    def residual(
        self, space: Space, value: AtPoints | None, gradient: AtPoints | None
    ) -> jax.Array | None:
        parts = []
        if value is not None:
            f = self._weighted(value)
            parts.append(jnp.einsum("eqc,eqa->eac", f, self.tables(space, f.dtype)[0]))
        if gradient is not None:
            f = self._weighted(gradient)
            parts.append(jnp.einsum("eqci,eqai->eac", f, self.tables(space, f.dtype)[1]))
        return sum(parts[1:], parts[0]) if parts else None

    def matrix(self, rows: Space, columns: Space, blocks: Blocks) -> jax.Array | None:
        sums = {
            "eqcC,eqa,eqb->eacbC": (blocks.value_value, 0, 0),
            "eqcCk,eqa,eqbk->eacbC": (blocks.value_gradient, 0, 1),
            "eqciC,eqai,eqb->eacbC": (blocks.gradient_value, 1, 0),
            "eqciCk,eqai,eqbk->eacbC": (blocks.gradient_gradient, 1, 1),
        }
        parts = []
        for indices, (block, first, second) in sums.items():
            if block is not None:
                h = self._weighted(block)
                row_tables, column_tables = (self.tables(s, h.dtype) for s in (rows, columns))
                parts.append(jnp.einsum(indices, h, row_tables[first], column_tables[second]))
        return sum(parts[1:], parts[0]) if parts else None

    def _weighted(self, f: AtPoints) -> jax.Array:
        weights = self._weights(f.array.dtype)
        return f.array * weights.reshape(*weights.shape, *[1] * (f.array.ndim - 2))


# ---- Vectors in other coordinates: a primitive, so that its adjoint is as fast as itself ----


def _transform(f: jax.Array, matrices: jax.Array, adjoint: bool = False) -> jax.Array:
    """Return Σ_i f_i m_ji, or Σ_j f_j m_ji for the adjoint.

    Parameters
    ----------
    f
        Vectors in the last axis, shape (n, q, ..., dim).
    matrices
        Shape (n, q, dim, dim). No derivative is taken with respect to them. Here and in `f`, n and
        q may be 1.
    """
    lead = np.broadcast_shapes(f.shape[:2], matrices.shape[:2])
    f = jnp.broadcast_to(f, (*lead, *f.shape[2:]))
    return _transform_p.bind(f, matrices, adjoint=adjoint)[0]


def _compute(f: jax.Array, matrices: jax.Array, *, adjoint: bool) -> list[jax.Array]:
    shape = (*matrices.shape[:2], *[1] * (f.ndim - 3), *matrices.shape[2:])
    m = matrices.reshape(shape)
    m = m.swapaxes(-1, -2) if adjoint else m
    # XLA merges these two or three terms with what comes before. A sum over an axis takes ten times
    # as long.
    return [functools.reduce(jnp.add, (f[..., None, i] * m[..., i] for i in range(f.shape[-1])))]


def _differentiate(operands: Any, params: Any, _: Activity) -> Any:
    def tangent(matrices: Any, tangents: Any) -> Any:
        return _transform_p.bind(tangents[0], matrices, **params)

    return _transform_p.bind(*operands, **params), operands[1], tangent


def _transpose(cotangents: Any, operands: Any, _: Any, params: Any) -> Any:
    back = _transform_p.bind(cotangents[0], operands[1], adjoint=not params["adjoint"])
    return [*back, None]


def _batch(operands: Any, axes: Any, params: Any) -> Any:
    assert axes[1] is None  # matrices belong to the mesh
    return _transform_p.bind(jnp.moveaxis(operands[0], axes[0], 2), operands[1], **params), [2]


_transform_p = primitive(
    "transform",
    shapes=lambda f, _, **__: [f],
    run=_compute,
    messages=False,
    differentiate=_differentiate,
    transpose=_transpose,
    batch=_batch,
)
