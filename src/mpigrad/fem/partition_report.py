"""Count what a division of a mesh gives to each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpigrad.communicator import Communicator
from mpigrad.fem.numbering import Numbering

__all__ = ["PartitionReport", "make_report"]


@dataclass(frozen=True)
class PartitionReport:
    """Numbers of a divided mesh, the same on all ranks. Printing it shows a table.

    Attributes
    ----------
    method
        The method that has divided the cells.
    cells, vertices, ghosts, neighbors
        For each rank: its cells, its own vertices, its ghosts, and the ranks with which it
        exchanges values of vertices, shape (size,).
    n_cut
        The number of facets between cells of different ranks.

    Examples
    --------
    >>> from mpigrad import fem
    >>> report = fem.box((4, 4), (1.0, 1.0)).partition_report()
    >>> report.cells.tolist(), report.n_cut, report.imbalance
    ([16], 0, 1.0)
    """

    method: str
    cells: NDArray[np.int64]
    vertices: NDArray[np.int64]
    ghosts: NDArray[np.int64]
    neighbors: NDArray[np.int64]
    n_cut: int

    @property
    def imbalance(self) -> float:
        """The largest number of cells of a rank, divided by the mean."""
        return float(self.cells.max() / self.cells.mean())

    def __str__(self) -> str:
        lines = [
            f"partition by {self.method}: {self.cells.sum()} cells, {self.n_cut} cut facets, "
            f"imbalance {self.imbalance:.3f}",
            f"{'rank':>6} {'cells':>10} {'vertices':>10} {'ghosts':>10} {'neighbours':>10}",
        ]
        rows = zip(self.cells, self.vertices, self.ghosts, self.neighbors, strict=True)
        lines += [f"{rank:>6} {c:>10} {v:>10} {g:>10} {n:>10}" for rank, (c, v, g, n) in
                  enumerate(rows)]  # fmt: skip
        return "\n".join(lines)


def make_report(
    comm: Communicator, method: str, n_cells: int, vertices: Numbering, n_cut: int
) -> PartitionReport:
    """Gather the numbers of all ranks (collective)."""
    own = (n_cells, vertices.n_local, vertices.n_ghosts, len(vertices.exchange.neighbors), n_cut)
    table = np.asarray(comm.mpi.allgather(own), np.int64)
    cells, n_local, ghosts, neighbors, cut = table.T
    return PartitionReport(method, cells, n_local, ghosts, neighbors, int(cut.sum()) // 2)
