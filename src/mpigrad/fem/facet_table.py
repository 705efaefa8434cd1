"""All facets of a rank's cells, and on how many cells of all ranks each of them lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpigrad.collective_errors import raise_error
from mpigrad.fem.grouping import group_rows
from mpigrad.fem.numbering import Numbering
from mpigrad.fem.reference import reference_cell
from mpigrad.fem.route import Route

__all__ = ["FacetTable", "make_facet_table", "match_facets"]


def match_facets(
    corners: NDArray[np.integer], n: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Find equal facets among facets that are given by their corners.

    Parameters
    ----------
    corners
        Corners of shape (m, k), in any order within a row: integers from 0 to n - 1.

    Returns
    -------
    first, second, count
        For each different facet two rows that have it, or the same row twice, and the number of
        rows.
    """
    # Three corners of a quadrilateral say which one it is.
    order, starts = group_rows(np.sort(corners, axis=1)[:, :3], n)
    return order[starts[:-1]], order[starts[1:] - 1], np.diff(starts)


@dataclass(frozen=True)
class FacetTable:
    """The different facets of a rank's cells.

    Attributes
    ----------
    cells, local_facets
        For each facet the cell that it belongs to, or the cell of this rank that has it, and its
        number in that cell, shape (k,).
    is_boundary
        True for each facet that is on one cell only, among the cells of all ranks, shape (k,).
    is_local
        True for each facet that belongs to a cell of this rank. A facet between two cells belongs
        to the cell with the lower number in the file.
    n_cut
        The number of facets between a cell of this rank and a cell of another one.
    """

    cells: NDArray[np.int32]
    local_facets: NDArray[np.int8]
    is_boundary: NDArray[np.bool_]
    is_local: NDArray[np.bool_]
    n_cut: int


def make_facet_table(
    cells: NDArray[np.int32],
    cell_ids: NDArray[np.int64],
    vertices: Numbering,
    cell_type: str,
) -> FacetTable:
    """Make the table of the facets of this rank's cells (collective)."""
    comm = vertices.comm
    table = reference_cell(cell_type).facets
    n_facets = len(table)
    corners = cells[:, table].reshape(-1, table.shape[1])
    n = vertices.n_local + vertices.n_ghosts
    first, second, count = match_facets(corners, n)
    # The facet belongs to the cell with the lower number.
    swap = cell_ids[second // n_facets] < cell_ids[first // n_facets]
    row = np.where(swap, second, first)
    cell = row // n_facets

    # A facet whose corners are all shared may lie on cells of other ranks. The owner of its first
    # vertex hears of it from all of them.
    shared = np.zeros(n, bool)
    shared[vertices.n_local :] = True
    shared[np.asarray(vertices.exchange.send_index)] = True
    near = np.flatnonzero(shared[corners[row]].all(axis=1))
    numbers = np.sort(vertices.numbers[corners[row[near]]], axis=1)[:, :3]
    route = Route(comm, vertices.owners(numbers[:, 0]))
    heard = route.forward(np.column_stack([numbers, count[near], cell_ids[cell[near]]]))
    order, starts = group_rows(heard[:, :-2], max(vertices.n_global, 1))
    answer = np.empty((len(heard), 2), np.int64)
    if len(heard):
        sizes = np.diff(starts)
        answer[order, 0] = np.repeat(np.add.reduceat(heard[order, -2], starts[:-1]), sizes)
        answer[order, 1] = np.repeat(np.minimum.reduceat(heard[order, -1], starts[:-1]), sizes)
    answer = route.back(answer)

    error = None
    total = count.copy()
    total[near] = answer[:, 0]
    if np.any(total > 2):
        wrong = int(np.flatnonzero(total > 2)[0])
        error = ValueError(
            f"Mesh.facets: a facet must lie on one or two cells, got a facet of cell "
            f"{cell_ids[cell[wrong]]} that lies on {total[wrong]} cells. Repair the mesh."
        )
    raise_error(comm, error)
    is_local = np.ones(len(row), bool)
    is_local[near] = answer[:, 1] == cell_ids[cell[near]]
    return FacetTable(
        cells=cell.astype(np.int32),
        local_facets=(row % n_facets).astype(np.int8),
        is_boundary=total == 1,
        is_local=is_local,
        n_cut=int(np.count_nonzero((total == 2) & (count == 1))),
    )
