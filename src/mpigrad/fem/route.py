"""Rows that travel to chosen ranks, and answers that travel back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad.communicator import BlockingCall, Communicator

__all__ = ["Route"]

_TASK = "the making of a mesh"


class Route:
    """Send rows of NumPy arrays to ranks, and answers back to the senders (collective).

    Parameters
    ----------
    comm
        The communicator.
    ranks
        The rank that each row goes to, shape (n,).

    Attributes
    ----------
    sources
        The rank that each received row comes from, sorted, shape (m,).
    """

    def __init__(self, comm: Communicator, ranks: NDArray[Any]) -> None:
        self.comm = comm
        self._order = np.argsort(ranks, kind="stable")
        self._sent = np.bincount(ranks, minlength=comm.size).astype(np.int64)
        self._received = self._sent.copy()
        if comm.size > 1:
            with BlockingCall(_TASK):
                comm.mpi.Alltoall(self._sent, self._received)
        self.sources = np.repeat(np.arange(comm.size), self._received)

    def forward(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the rows that all ranks send to this rank, in the order of ranks."""
        return self._exchange(rows[self._order], self._sent, self._received)

    def back(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the answers to this rank's rows, in the order in which it has them.

        Parameters
        ----------
        rows
            One answer for each received row.
        """
        answers = self._exchange(rows, self._received, self._sent)
        result = np.empty_like(answers)
        result[self._order] = answers
        return result

    def _exchange(
        self, rows: NDArray[Any], sent: NDArray[np.int64], received: NDArray[np.int64]
    ) -> NDArray[Any]:
        if self.comm.size == 1:
            return rows
        rows = np.ascontiguousarray(rows)
        width = int(np.prod(rows.shape[1:], dtype=np.int64))
        result = np.empty((int(received.sum()), *rows.shape[1:]), rows.dtype)
        with BlockingCall(_TASK):
            self.comm.mpi.Alltoallv(
                [rows.reshape(-1), [int(n) * width for n in sent]],
                [result.reshape(-1), [int(n) * width for n in received]],
            )
        return result
