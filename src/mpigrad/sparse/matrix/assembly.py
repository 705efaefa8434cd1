"""Assembly of entries that are given on any rank, any number of times."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mpigrad.communicator import BlockingCall, Communicator
from mpigrad.operations import neighbor_alltoallv
from mpigrad.operations.local_programs import as_array
from mpigrad.sparse.matrix.ghost_exchange import _tell_owners
from mpigrad.sparse.matrix.multilinear import TrilinearContraction, add_up, select

__all__ = ["Assembly", "repeated", "row_order"]


def row_order(rows: np.ndarray, columns: np.ndarray, n_columns: int) -> tuple[np.ndarray, bool]:
    """Return the permutation to row order, stable, and True if it is the identity."""
    down, across = np.diff(rows), np.diff(columns)
    if bool(np.all((down > 0) | ((down == 0) & (across >= 0)))):
        return np.arange(len(rows)), True
    if (int(rows.max()) + 1) * n_columns < 2**63:
        return np.argsort(rows * n_columns + columns, kind="stable"), False
    return np.lexsort((columns, rows)), False


def repeated(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return True for each entry in row order, from the second on, that equals the one before."""
    return (np.diff(rows) == 0) & (np.diff(columns) == 0)


class Assembly:
    """The sum of the contributions of all ranks to each stored entry.

    A linear map from this rank's contributions (n_given,) to its stored entries (nnz,). It sends
    one message to each rank that owns rows of this rank's contributions, and adds in a fixed order
    (the rank's own contributions as given, those of the other ranks by rank, and these two sums),
    so that sums are the same to the bit in every run. Its adjoint sends each contribution the
    cotangent of its entry. Making it is collective.

    Parameters
    ----------
    rows, columns
        The global indices of the contributions, shape (n_given,).
    starts
        The first row of each rank, followed by the number of rows.
    n_columns
        The number of columns of all ranks.

    Attributes
    ----------
    rows, columns
        The global indices of this rank's stored entries, in row order, shape (nnz,).
    neighbors
        The ranks to which this rank sends contributions, or from which it receives them.
    """

    def __init__(
        self,
        comm: Communicator,
        rows: np.ndarray,
        columns: np.ndarray,
        starts: np.ndarray,
        n_columns: int,
    ) -> None:
        self.comm, self.n_given = comm, len(rows)
        # Empty stripes share their start with the next one. `right` finds the rank that owns it.
        owners = np.searchsorted(starts, rows, side="right") - 1
        leaving = np.flatnonzero(owners != comm.rank)
        leaving = leaving[np.argsort(owners[leaving], kind="stable")]
        to = {int(rank): leaving[owners[leaving] == rank] for rank in np.unique(owners[leaving])}
        with BlockingCall("the making of a Pattern"):
            come = _tell_owners(
                comm, {rank: np.concatenate([rows[k], columns[k]]) for rank, k in to.items()}
            )
        comm.mpi.Barrier()  # no rank starts another handshake while one still probes
        self.neighbors = tuple(sorted({*to, *come}))
        self.sendcounts = tuple(len(to.get(rank, ())) for rank in self.neighbors)
        self.recvcounts = tuple(len(come.get(rank, ())) // 2 for rank in self.neighbors)
        staying = np.flatnonzero(owners == comm.rank)

        received = [come[rank].reshape(2, -1) for rank in self.neighbors if rank in come]
        own = np.stack([rows[staying], columns[staying]])
        i, j = np.concatenate([own, *received], axis=1)
        order, _ = row_order(i - starts[comm.rank], j, n_columns)
        first = np.concatenate([[True], ~repeated(i[order], j[order])])[: len(i)]
        self.rows, self.columns = i[order][first], j[order][first]
        target = np.empty(len(i), np.int64)
        target[order] = np.cumsum(first) - 1
        kept = np.full(self.n_given, -1, np.int64)
        kept[staying] = target[: len(staying)]
        n_entries = len(self.rows)
        # In the native library, because they would be constants of each compiled program.
        self._leaving = TrilinearContraction.selection(leaving, self.n_given)
        self._own = TrilinearContraction.selection(kept, n_entries)
        self._received = TrilinearContraction.selection(target[len(staying) :], n_entries)

    def __call__(self, values: Any) -> jax.Array:
        values = as_array(values)
        if values.shape != (self.n_given,):
            raise ValueError(
                f"pattern.assemble: values have shape {values.shape} on rank {self.comm.rank}, "
                f"which gave the pattern {self.n_given} entries. Give shape ({self.n_given},)."
            )
        sums = add_up(self._own, values)
        if not self.neighbors:
            return sums
        received = neighbor_alltoallv(
            select(self._leaving, values),
            self.neighbors,
            self.sendcounts,
            self.recvcounts,
            self.comm,
        )
        return sums + add_up(self._received, received)
