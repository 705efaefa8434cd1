"""Facets of cells: edges in two dimensions, faces in three."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpigrad.fem.reference import reference_cell

if TYPE_CHECKING:
    from mpigrad.fem.mesh import Mesh

__all__ = ["Facets"]


@dataclass(frozen=True, eq=False)
class Facets:
    """The facets of this rank in a set of facets of the whole mesh.

    Each facet of the set is on one rank only: the rank of its cell. A facet between two cells
    belongs to the cell with the lower number in the file, on any number of ranks.

    Attributes
    ----------
    mesh
        The mesh.
    cells
        The cell of each facet, shape (k,), int32.
    local_facets
        The number of the facet in the reference cell of basix, shape (k,), int8.

    Examples
    --------
    >>> from mpigrad import fem
    >>> mesh = fem.box((4, 2), (1.0, 1.0))
    >>> mesh.boundary_facets().n_global, mesh.facets("xmin").n_global
    (12, 2)
    """

    mesh: Mesh
    cells: NDArray[np.int32]
    local_facets: NDArray[np.int8]

    @property
    def n_local(self) -> int:
        """The number of facets of this rank."""
        return len(self.cells)

    @property
    def n_global(self) -> int:
        """The number of facets of all ranks (collective)."""
        return int(self.mesh.comm.mpi.allreduce(self.n_local))

    @property
    def corners(self) -> NDArray[np.int32]:
        """The local indices of the corners of each facet, shape (k, corners of a facet)."""
        table = reference_cell(self.mesh.cell_type).facets
        return self.mesh.cells[self.cells[:, None], table[self.local_facets]]

    def centers(self) -> NDArray[np.float64]:
        """Return the mean of the corners of each facet, shape (k, dim)."""
        return self.mesh.points[self.corners].mean(axis=1)

    def __repr__(self) -> str:
        return f"Facets(n_local={self.n_local})"
