"""Constants and rigid motions that Dirichlet conditions leave free."""

from __future__ import annotations

import dataclasses

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpigrad.fem.pieces import pieces_of_cells
from mpigrad.fem.space import Space

__all__ = ["FreeMode", "free_modes"]


@dataclasses.dataclass(frozen=True)
class FreeMode:
    """A field that is zero at all fixed unknowns.

    Attributes
    ----------
    name
        What it is, for an error.
    values
        A field of this rank, of the order of 1.
    """

    name: str
    values: NDArray[np.float64]


def free_modes(
    space: Space, fixed: NDArray[np.bool_], rotations: bool | None = None
) -> list[FreeMode]:
    """Return constants and rotations that are zero where `fixed` is true (collective).

    Each piece of the mesh is looked at for itself. By default there are rotations for fields with
    as many components as the mesh has dimensions, which may be displacements.
    """
    if rotations is None:
        rotations = space.components == space.mesh.dim
    pieces = space.cached("pieces of nodes", lambda: _pieces_of_nodes(space))
    modes = []
    for nodes in pieces:
        middle, length = _extent(space, nodes)
        names, basis = _motions(space, nodes, (space.node_points - middle) / length, rotations)
        rows = basis[:, fixed.reshape(-1)]
        gram = np.empty((len(basis),) * 2)
        space.mesh.comm.mpi.Allreduce(rows @ rows.T, gram)
        size, vectors = np.linalg.eigh(gram)
        place = ", ".join(f"{x:.3g}" for x in middle)
        where = f" in the piece of the mesh around ({place})" if len(pieces) > 1 else ""
        for vector in vectors.T[size <= 1e-10 * max(float(size[-1]), 1.0)]:
            main = names[int(np.argmax(np.abs(vector)))]
            pure = np.abs(vector).max() > 1 - 1e-8
            name = main if pure else "a rigid motion"
            modes.append(FreeMode(name + where, (vector @ basis).reshape(space.shape)))
    return modes


def _extent(space: Space, nodes: NDArray[np.bool_]) -> tuple[NDArray[np.float64], float]:
    """Return the middle of the box around a piece, and its longest side."""
    points = space.node_points[: space.nodes.n_local][nodes]
    ends = np.stack([np.min(points, 0, initial=np.inf), np.min(-points, 0, initial=np.inf)])
    space.mesh.comm.mpi.Allreduce(MPI.IN_PLACE, ends, MPI.MIN)
    return (ends[0] - ends[1]) / 2, float(np.max(-ends[1] - ends[0]))


def _motions(
    space: Space, nodes: NDArray[np.bool_], x: NDArray[np.float64], rotations: bool
) -> tuple[list[str], NDArray[np.float64]]:
    """Return names and values of the motions of a piece, shape (motions, unknowns)."""
    components, dim = space.components, space.mesh.dim
    names = [f"a constant in component {c}" for c in range(components)]
    basis = [np.outer(nodes, np.eye(components)[c]) for c in range(components)]
    if rotations:
        x = x[: len(nodes)]
        for i, j in [(0, 1)] if dim == 2 else [(0, 1), (1, 2), (2, 0)]:
            turn = np.zeros((len(x), dim))
            turn[:, i], turn[:, j] = -x[:, j], x[:, i]
            names.append("a rotation")
            basis.append(turn * nodes[:, None])
    return names, np.stack([each.reshape(-1) for each in basis])


def _pieces_of_nodes(space: Space) -> list[NDArray[np.bool_]]:
    """Return for each piece True at this rank's own nodes in it."""
    count, of_cells = pieces_of_cells(space.mesh)
    if count == 1:
        return [np.ones(space.nodes.n_local, bool)]
    masks = []
    for piece in range(count):
        chosen = np.zeros(space.nodes.n_local + space.nodes.n_ghosts, bool)
        chosen[space.cell_nodes[of_cells == piece]] = True
        masks.append(space.nodes.combine_at_owners(chosen))
    return masks
