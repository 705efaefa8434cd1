"""The values of a field at the nodes of each cell, and the sum of contributions of cells."""

from __future__ import annotations

from typing import Any

import jax

from mpigrad.fem.space import Space
from mpigrad.operations.local_programs import as_array
from mpigrad.sparse.matrix.csr import ghost_values
from mpigrad.sparse.matrix.multilinear import TrilinearContraction, add_up, select

__all__ = ["cell_values", "sum_over_cells"]


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
    return select(_selection(space), u, ghost_values(space.nodes.exchange, u), lead)


def sum_over_cells(space: Space, contributions: jax.Array) -> jax.Array:
    """Add up contributions (n_cells, n_basis, components) at the nodes (collective)."""
    sums = add_up(_selection(space), contributions, space.shape[1:])
    return space.nodes.exchange.accumulate(sums)


def _selection(space: Space) -> TrilinearContraction:
    def make() -> TrilinearContraction:
        n = space.nodes.n_local + space.nodes.n_ghosts
        return TrilinearContraction.selection(space.cell_nodes.ravel(), n)

    return space.cached("selection", make)
