"""The values of a field at the nodes of each cell, and the sum of contributions of cells."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.fem.space import Space
from mpigrad.sparse.matrix.multilinear import TrilinearContraction, add_up, select

__all__ = ["cell_values", "sum_over_cells"]


def cell_values(space: Space, u: Any) -> jax.Array:
    """Return a field at the nodes of each cell, shape (n_cells, n_basis, components) (collective).

    It is linear and differentiable. Its adjoint is `sum_over_cells`.
    """
    u = jnp.asarray(u)
    if u.shape != space.shape:
        raise ValueError(
            f"fem: expected a field of shape {space.shape} on rank {space.mesh.comm.rank}, got "
            f"{u.shape}. Give one row for each own node of the space."
        )
    everywhere = space.nodes.exchange.local_and_ghost(u.reshape(-1, space.components))
    values = select(_selection(space), everywhere)
    return values.reshape(*space.cell_nodes.shape, space.components)


def sum_over_cells(space: Space, contributions: jax.Array) -> jax.Array:
    """Add up contributions (n_cells, n_basis, components) at the nodes (collective)."""
    flat = contributions.reshape(-1, space.components)
    sums = space.nodes.exchange.accumulate(add_up(_selection(space), flat))
    return sums.reshape(space.shape)


def _selection(space: Space) -> TrilinearContraction:
    def make() -> TrilinearContraction:
        n = space.nodes.n_local + space.nodes.n_ghosts
        return TrilinearContraction.selection(space.cell_nodes.ravel(), n)

    return space.cached("selection", make)
