"""Contiguous global numbers over ranks, and the numbers of other ranks that a rank reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import ArrayLike, NDArray

from mpigrad.communicator import SWAP_TAG, BlockingCall, Communicator, resolve
from mpigrad.sparse import GhostExchange

__all__ = ["Numbering"]


class Numbering:
    """Global numbers of vertices or nodes: each rank owns a contiguous range (collective).

    A rank stores its own entries first, then the entries of other ranks that its cells need, the
    *ghosts*. A local index below `n_local` is an own entry, and `n_local + k` is ghost k.

    Parameters
    ----------
    n_local
        The number of entries that this rank owns.
    ghosts
        Global numbers of entries of other ranks that this rank reads, in any order.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Attributes
    ----------
    n_global
        The number of entries on all ranks.
    offset
        The first number of this rank.
    starts
        The first number of each rank, followed by `n_global`, shape (size + 1,).
    ghosts
        The sorted global numbers of the ghosts, shape (n_ghosts,), int64. They are sorted by owner
        too, as the ranges of the ranks follow each other.
    exchange
        The differentiable exchange: `exchange.local_and_ghost(x)` returns x with its ghosts.

    Examples
    --------
    >>> from mpigrad import fem
    >>> mesh = fem.box((2, 2), (1.0, 1.0))
    >>> mesh.vertices.n_global, mesh.vertices.offset, len(mesh.vertices.ghosts)
    (9, 0, 0)
    """

    def __init__(self, n_local: int, ghosts: ArrayLike, comm: Communicator | None = None) -> None:
        self.comm = resolve(comm)
        self.exchange = GhostExchange(n_local, np.asarray(ghosts, np.int64), self.comm)
        self.n_local = self.exchange.n_local
        self.n_global = self.exchange.n_global
        self.offset = self.exchange.offset
        self.ghosts: NDArray[np.int64] = self.exchange.ghosts
        sizes = np.asarray(self.comm.mpi.allgather(self.n_local), np.int64)
        self.starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes)])

    @property
    def n_ghosts(self) -> int:
        """The number of entries of other ranks that this rank reads."""
        return len(self.ghosts)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The global number of each local index, shape (n_local + n_ghosts,)."""
        own = np.arange(self.offset, self.offset + self.n_local, dtype=np.int64)
        return np.concatenate([own, self.ghosts])

    def owners(self, numbers: ArrayLike) -> NDArray[np.int64]:
        """Return the rank that owns each global number."""
        return np.searchsorted(self.starts, np.asarray(numbers), side="right") - 1

    def local_index(self, numbers: ArrayLike) -> NDArray[np.int32]:
        """Return the local index of each global number: own entries, then ghosts.

        Parameters
        ----------
        numbers
            Global numbers of own entries and ghosts, of any shape.

        Returns
        -------
        Indices of the same shape, int32.

        Raises
        ------
        ValueError
            On this rank: if a number is neither an own entry nor a ghost of this rank.
        """
        index, known = self.find(numbers)
        if not np.all(known):
            number = int(np.asarray(numbers)[~known][0])
            raise ValueError(
                f"Numbering.local_index: expected own numbers and ghosts, got {number} on rank "
                f"{self.comm.rank}, which owns {self.offset} to {self.offset + self.n_local - 1}. "
                "Give numbers of this rank's cells."
            )
        return index

    def find(self, numbers: ArrayLike) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return local indices, and True for each number that this rank owns or reads."""
        given = np.asarray(numbers, np.int64)
        index = given - self.offset
        remote = (index < 0) | (index >= self.n_local)
        known = ~remote
        if np.any(remote):
            wanted = given[remote]
            place = np.searchsorted(self.ghosts, wanted)
            found = np.zeros(len(wanted), bool)
            inside = place < self.n_ghosts
            found[inside] = self.ghosts[place[inside]] == wanted[inside]
            index[remote] = np.where(found, self.n_local + place, -1)
            known[remote] = found
        return index.astype(np.int32), known

    def append_ghosts(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return this rank's entries followed by the ghosts' (collective, NumPy).

        Parameters
        ----------
        x
            This rank's entries, shape (n_local, ...), of any dtype without objects.
        """
        if not self.exchange.neighbors:
            return x
        sent = np.ascontiguousarray(x[self._send_index])
        received = np.empty((self.n_ghosts, *x.shape[1:]), x.dtype)
        self._swap(sent, self.exchange.sendcounts, received, self.exchange.recvcounts)
        return np.concatenate([x, received])

    def combine_at_owners(self, x: NDArray[Any], combine: np.ufunc = np.logical_or) -> NDArray[Any]:
        """Combine the ghosts' entries of all ranks with those of their owners (collective, NumPy).

        Parameters
        ----------
        x
            Own entries followed by ghosts, shape (n_local + n_ghosts, ...).
        combine
            A binary ufunc of NumPy, for example `np.logical_or` or `np.add`.

        Returns
        -------
        This rank's entries, shape (n_local, ...).
        """
        sent = np.ascontiguousarray(x[self.n_local :])
        received = np.empty((len(self._send_index), *x.shape[1:]), x.dtype)
        self._swap(sent, self.exchange.recvcounts, received, self.exchange.sendcounts)
        result = x[: self.n_local].copy()
        combine.at(result, self._send_index, received)
        return result

    @property
    def _send_index(self) -> NDArray[Any]:
        return np.asarray(self.exchange.send_index)

    def _swap(
        self,
        sent: NDArray[Any],
        sendcounts: tuple[int, ...],
        received: NDArray[Any],
        recvcounts: tuple[int, ...],
    ) -> None:
        """Exchange rows with the neighbours, whose rows follow each other in both arrays."""
        requests = []
        comm = self.comm.derivatives
        with BlockingCall("an exchange of ghosts of a mesh"):
            for rows, counts, start in (
                (received, recvcounts, comm.Irecv),
                (sent, sendcounts, comm.Isend),
            ):
                first = 0
                for rank, count in zip(self.exchange.neighbors, counts, strict=True):
                    if count:
                        part = rows[first : first + count]
                        requests.append(start([part, part.nbytes, MPI.BYTE], rank, SWAP_TAG))
                    first += count
            MPI.Request.Waitall(requests)

    def __repr__(self) -> str:
        return (
            f"Numbering(n_local={self.n_local}, n_ghosts={self.n_ghosts}, n_global={self.n_global})"
        )
