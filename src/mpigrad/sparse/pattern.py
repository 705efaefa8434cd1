"""The sparsity pattern of a distributed matrix: built once, on the host."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from mpigrad.communicator import Communicator, resolve
from mpigrad.sparse.agreement import raise_together
from mpigrad.sparse.ghost import GhostExchange, _count, _indices, index_array

__all__ = ["Pattern"]


class Pattern:
    """Where the entries of a square, row-striped sparse matrix are.

    Rank r owns a contiguous stripe of rows, and the same stripe of every vector; stripes follow
    each other in the order of the ranks, may differ in size and may be empty. Building a pattern
    is collective. It costs sorting and a handshake: build it once and keep it.

    Attributes
    ----------
    comm
        Its communicator.
    n_rows, offset, n_local, nnz
        Rows on all ranks; first row and number of rows of this rank; entries of this rank.
    rows, columns
        Local row and global column of each entry, in row order (sorted by row, then column).
    order
        Position, among the entries as they were given, of each entry in row order, shape (nnz,).
        Values always come in the order in which the entries were given.
    row_starts
        Where each row starts in row order, shape (n_local + 1,).
    diagonal
        Position of each row's diagonal entry among the entries as given, -1 where a row has none.
    ghosts
        The exchange of the columns that other ranks own.
    """

    def __init__(
        self, rows: Any, columns: Any, n_local: int, comm: Communicator | None = None
    ) -> None:
        self.comm = resolve(comm)
        error: Exception | None = None
        i, j = np.zeros(0, np.int64), np.zeros(0, np.int64)
        own = 0
        try:
            own = _count(n_local)
            i, j = _indices(rows, "rows"), _indices(columns, "columns")
            if len(i) != len(j):
                raise ValueError(
                    f"Pattern: {len(i)} rows but {len(j)} columns; give one pair for each entry"
                )
        except (TypeError, ValueError) as problem:
            error = problem
        raise_together(self.comm, error)

        total = self.comm.mpi.allreduce(own)
        offset = self.comm.mpi.scan(own) - own
        if total == 0:
            error = ValueError("Pattern: no rank has any row; give n_local > 0 on some rank")
        elif len(i) and (i.min() < offset or i.max() >= offset + own):
            stray = i[(i < offset) | (i >= offset + own)][0]
            error = ValueError(
                f"Pattern: row {stray} does not belong to this rank, which owns rows {offset} to "
                f"{offset + own - 1}; give each entry on the rank that owns its row (rows are "
                "global indices)"
            )
        elif len(j) and (j.min() < 0 or j.max() >= total):
            stray = j[(j < 0) | (j >= total)][0]
            error = ValueError(
                f"Pattern: column {stray} is outside the matrix of {total} rows and columns "
                f"(0 to {total - 1})"
            )
        raise_together(self.comm, error)

        local = i - offset
        key = local * total + j
        ordered = bool(np.all(key[1:] > key[:-1]))
        order = np.arange(len(i)) if ordered else np.argsort(key, kind="stable")
        if not ordered:
            key = key[order]
        twice = np.flatnonzero(key[1:] == key[:-1])
        if twice.size:
            row, column = divmod(int(key[twice[0]]), total)
            error = ValueError(
                f"Pattern: entry ({row + offset}, {column}) is given more than once; "
                "add such contributions into one value"
            )
        raise_together(self.comm, error)

        self.n_rows, self.offset, self.n_local, self.nnz = total, offset, own, len(i)
        self.rows, self.columns, self.order = local[order], j[order], order
        self.is_ordered = ordered
        counts = np.bincount(self.rows, minlength=own)
        self.row_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.diagonal = np.full(own, -1, np.int64)
        on_diagonal = self.columns == self.rows + offset
        self.diagonal[self.rows[on_diagonal]] = order[on_diagonal]
        self.ghosts = GhostExchange(own, j, self.comm)
        # The first row, of all ranks, without a diagonal entry; -1 if there is none.
        bare = np.flatnonzero(self.diagonal < 0)
        first = self.comm.mpi.allgather(int(bare[0]) + offset if bare.size else -1)
        self.row_without_diagonal = min((row for row in first if row >= 0), default=-1)
        self._given_rows = local
        # A solver's messages have a space of their own; making it here is collective.
        self.solver_communicator = _solver_communicator(self.comm)
        self.solver_systems: dict[Any, Any] = {}  # what solvers keep from call to call

    @classmethod
    def from_coo(
        cls, rows: Any, columns: Any, n_local: int, comm: Communicator | None = None
    ) -> Pattern:
        """The pattern of entries (rows[k], columns[k]).

        Parameters
        ----------
        rows, columns
            Global indices of this rank's entries, shape (nnz,), in any order.
        n_local
            Number of rows that this rank owns.

        Raises
        ------
        ValueError
            On all ranks, where a row belongs to another rank, a column is out of range, an entry
            is given twice, or no rank has any row.
        """
        return cls(rows, columns, n_local, comm)

    @functools.cached_property
    def row_index(self) -> jax.Array:
        """Local row of each entry as given."""
        return index_array(self._given_rows)

    @functools.cached_property
    def diagonal_index(self) -> jax.Array:
        return index_array(self.diagonal)

    def __repr__(self) -> str:
        return (
            f"Pattern(n_rows={self.n_rows}, offset={self.offset}, n_local={self.n_local}, "
            f"nnz={self.nnz})"
        )


@functools.cache
def _solver_communicator(comm: Communicator) -> Any:
    from mpi4py import MPI

    duplicate = comm.mpi.Dup()
    duplicate.Set_errhandler(MPI.ERRORS_ARE_FATAL)  # hypre checks no return code of MPI
    return duplicate
