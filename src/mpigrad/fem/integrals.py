"""Sums over the quadrature points of cells and facets: fields, residuals and element matrices.

The gradient of basis function a in a cell is ∂N_a/∂x_i = Σ_j ∂N_a/∂ξ_j ∂ξ_j/∂x_i. In cells what an
integrand returns is transformed to reference coordinates first, so that the sums over points and
basis functions are products with one table for all cells.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.fem.geometry import cell_geometry, facet_geometry
from mpigrad.fem.mesh import Facets
from mpigrad.fem.pointwise import AtPoints
from mpigrad.fem.quadrature import Rule, cell_rule, facet_rule, tabulate
from mpigrad.fem.space import Space
from mpigrad.operations.indexing import take
from mpigrad.operations.kept_array import KeptArray
from mpigrad.sparse.matrix.ghost_exchange import index_array

__all__ = ["Blocks", "CellIntegral", "FacetIntegral", "Integral"]


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

    space: Space
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
    def residual(self, value: AtPoints | None, gradient: AtPoints | None) -> jax.Array | None:
        """Return ∫ f0 N_a + f1 · ∇N_a, shape (n, n_basis, c)."""

    @abc.abstractmethod
    def matrix(self, blocks: Blocks) -> jax.Array | None:
        """Return the element matrices, shape (n, n_basis, c, n_basis, C)."""


class CellIntegral(Integral):
    """All cells of this rank, or those of a mask."""

    def __init__(self, space: Space, degree: int, mask: np.ndarray | None) -> None:
        self.space, self.mask, self.n = space, mask, space.mesh.n_cells
        self.degree = degree
        mesh = space.mesh
        self.rule: Rule = space.cached(("rule", degree), lambda: cell_rule(mesh.cell_type, degree))
        self.geometry = mesh.cached(("geometry", degree), lambda: cell_geometry(mesh, self.rule))
        self.weights = self.rule.weights

    def coordinates(self, dtype: Any) -> AtPoints:
        table = jnp.asarray(self.geometry.shape_values, dtype)
        return AtPoints(jnp.einsum("qk,eki->eqi", table, self.geometry.corners(dtype)))

    def normals(self, dtype: Any) -> AtPoints | None:
        return None

    def tables(self, space: Space) -> tuple[np.ndarray, np.ndarray]:
        """Return values (q, n_basis) and reference gradients (q or 1, n_basis, dim)."""

        def make() -> tuple[np.ndarray, np.ndarray]:
            values, gradients = tabulate(space.mesh.cell_type, space.degree, self.rule.points)
            if np.ptp(gradients, axis=0).max() < 1e-12:
                gradients = gradients[:1]
            return values, gradients

        return space.cached(("tables", self.degree), make)

    def field(self, space: Space, values: jax.Array) -> tuple[AtPoints, AtPoints]:
        dtype = values.dtype
        table, gradients = (jnp.asarray(t, dtype) for t in self.tables(space))
        u = jnp.einsum("qa,eac->eqc", table, values)
        along = jnp.einsum("qaj,eac->eqcj", gradients, values)
        inverses = self.geometry.inverses(dtype)
        return AtPoints(u), AtPoints((along[..., None] * inverses[:, :, None]).sum(-2))

    def total(self, density: AtPoints) -> jax.Array:
        dtype = density.array.dtype
        values = self._weighted(density).array
        if values.shape[1] == 1:
            values = values * float(self.rule.weights.sum())
        else:
            values = values * jnp.asarray(self.rule.weights, dtype)
        return values.sum() * (1 if values.shape[0] == self.n else self.n)

    def residual(self, value: AtPoints | None, gradient: AtPoints | None) -> jax.Array | None:
        table, along = self.tables(self.space)
        parts = []
        if value is not None:
            f = self._weighted(value).array
            parts.append(jnp.einsum("eqc,qa->eac", f, self._table(table, f)))
        if gradient is not None:
            f = self._weighted(gradient).array
            f = _to_reference(f, self.geometry.inverses(f.dtype), 3)
            parts.append(jnp.einsum("eqcj,qaj->eac", f, self._table(along, f)))
        return self._for_all_cells(parts)

    def matrix(self, blocks: Blocks) -> jax.Array | None:
        table, along = self.tables(self.space)
        b, parts = blocks, []
        if b.value_value is not None:
            h = self._weighted(b.value_value).array  # (e, q, c, C)
            both = table[:, :, None] * table[:, None, :]
            parts.append(self._products(h, both))
        if b.value_gradient is not None:
            h = self._weighted(b.value_gradient).array
            h = _to_reference(h, self.geometry.inverses(h.dtype), 4)  # (e, q, c, C, l)
            both = table[:, None, :, None] * along.swapaxes(1, 2)[:, :, None]
            parts.append(self._products(h, both))
        if b.gradient_value is not None:
            h = self._weighted(b.gradient_value).array
            h = _to_reference(h, self.geometry.inverses(h.dtype), 3)  # (e, q, c, j, C)
            both = along.swapaxes(1, 2)[:, :, :, None] * table[:, None, None]
            parts.append(self._products(h.swapaxes(3, 4), both))
        if b.gradient_gradient is not None:
            h = self._weighted(b.gradient_gradient).array
            inverses = self.geometry.inverses(h.dtype)
            h = _to_reference(_to_reference(h, inverses, 3), inverses, 5)  # (e, q, c, j, C, l)
            by_axis = along.swapaxes(1, 2)
            both = by_axis[:, :, None, :, None] * by_axis[:, None, :, None, :]
            parts.append(self._products(h.swapaxes(3, 4), both))
        return self._for_all_cells(parts)

    def _products(self, h: jax.Array, both: np.ndarray) -> jax.Array:
        """Return Σ h (e, q, c, C, ...) both (q, ..., a, b): (e, a, c, b, C)."""
        e, c, n = h.shape[0], h.shape[2], both.shape[-1]
        table = self._table(both, h).reshape(-1, n * n)
        h = jnp.moveaxis(h, 1, 3).reshape(e * c * c, -1)
        sums = (h @ table).reshape(e, c, c, n, n)
        return sums.transpose(0, 3, 1, 4, 2)

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

    def __init__(self, space: Space, degree: int, facets: Facets) -> None:
        mesh = space.mesh
        self.space, self.n = space, facets.n_local
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

    def residual(self, value: AtPoints | None, gradient: AtPoints | None) -> jax.Array | None:
        parts = []
        if value is not None:
            f = self._weighted(value)
            parts.append(jnp.einsum("eqc,eqa->eac", f, self.tables(self.space, f.dtype)[0]))
        if gradient is not None:
            f = self._weighted(gradient)
            parts.append(jnp.einsum("eqci,eqai->eac", f, self.tables(self.space, f.dtype)[1]))
        return sum(parts[1:], parts[0]) if parts else None

    def matrix(self, blocks: Blocks) -> jax.Array | None:
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
                tables = self.tables(self.space, h.dtype)
                parts.append(jnp.einsum(indices, h, tables[first], tables[second]))
        return sum(parts[1:], parts[0]) if parts else None

    def _weighted(self, f: AtPoints) -> jax.Array:
        weights = self._weights(f.array.dtype)
        return f.array * weights.reshape(*weights.shape, *[1] * (f.array.ndim - 2))


def _to_reference(f: jax.Array, inverses: jax.Array, axis: int) -> jax.Array:
    """Replace an axis of components along x_i by components along ξ_j: Σ_i f_i ∂ξ_j/∂x_i."""
    f = jnp.moveaxis(f, axis, -1)
    shape = (*inverses.shape[:2], *[1] * (f.ndim - 3), *inverses.shape[2:])
    moved = (f[..., None, :] * inverses.reshape(shape)).sum(-1)
    return jnp.moveaxis(moved, -1, axis)
