"""Numbers over ranks: of rows that travel to chosen ranks, of equal rows, and of owned entries."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import ArrayLike, NDArray

from mpigrad.communicator import SWAP_TAG, BlockingCall, Communicator, resolve
from mpigrad.sparse import GhostExchange

__all__ = [
    "Numbering",
    "Route",
    "group_rows",
    "merge_numbers",
    "repeated_rows",
    "row_groups",
    "unique_numbers",
]

# ---- Rows that travel to chosen ranks, and answers that travel back ----


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


# ---- Find equal rows of integers ----


_LARGEST = 2**63 - 1
_SCRAMBLE = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # odd factors, as of SplitMix64


def group_rows(rows: NDArray[np.integer], n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Group equal rows of integers from 0 to n - 1.

    Returns
    -------
    order, starts
        The rows `order[starts[i]:starts[i + 1]]` are equal. `starts` has one entry more than there
        are groups.
    """
    # As many columns as fit are packed into one key, because one sort is faster than several.
    keys: list[NDArray[np.int64]] = []
    room = 0
    for column in rows.T:
        if room * n > _LARGEST or not keys:
            keys.append(column.astype(np.int64))
            room = n
        else:
            keys[-1] = keys[-1] * n + column
            room *= n
    order = np.argsort(keys[0]) if len(keys) == 1 else np.lexsort(keys[::-1])
    changes = np.zeros(max(len(rows) - 1, 0), bool)
    for key in keys:
        ordered = key[order]
        changes |= ordered[1:] != ordered[:-1]
    ends = [len(rows)] if len(rows) else []
    return order, np.concatenate([[0], np.flatnonzero(changes) + 1, ends]).astype(np.intp)


def row_groups(rows: NDArray[np.integer], n: int) -> tuple[NDArray[np.intp], int]:
    """Return the group of each row, and the number of groups of equal rows."""
    order, starts = group_rows(rows, n)
    group = np.empty(len(rows), np.intp)
    group[order] = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return group, len(starts) - 1


def repeated_rows(rows: NDArray[np.integer]) -> NDArray[np.intp]:
    """Return the indices of rows that have the same entries as another row, in any order."""
    # Rows of different entries rarely have the same sum of scrambled entries.
    keys = rows.astype(np.uint64)
    for factor, shift in zip(_SCRAMBLE, (29, 32), strict=True):
        keys *= np.uint64(factor)
        keys ^= keys >> np.uint64(shift)
    sums = keys.sum(axis=1)
    ordered = np.sort(sums)
    suspects = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    near = np.flatnonzero(np.isin(sums, suspects)) if len(suspects) else np.zeros(0, np.intp)
    if not len(near):
        return near
    group, n_groups = row_groups(np.sort(rows[near], axis=1), int(rows.max()) + 1)
    return near[np.bincount(group, minlength=n_groups)[group] > 1]


def unique_numbers(
    numbers: NDArray[np.int64], n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sorted different numbers, and the place of each given number among them.

    Parameters
    ----------
    numbers
        Integers from 0 to n - 1, of any shape.
    """
    if n > 16 * numbers.size:
        unique, inverse = np.unique(numbers, return_inverse=True)
        return unique, inverse.reshape(numbers.shape)
    used = np.zeros(n, bool)
    used[numbers] = True
    unique = np.flatnonzero(used)
    place = np.empty(n, np.int64)
    place[unique] = np.arange(len(unique))
    return unique, place[numbers]


# ---- Contiguous global numbers over ranks, and the numbers of other ranks that a rank reads ----


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
        local = np.arange(self.offset, self.offset + self.n_local, dtype=np.int64)
        return np.concatenate([local, self.ghosts])

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
        global_numbers = np.asarray(numbers, np.int64)
        index = global_numbers - self.offset
        remote = (index < 0) | (index >= self.n_local)
        known = ~remote
        if np.any(remote):
            wanted = global_numbers[remote]
            place = np.searchsorted(self.ghosts, wanted)
            is_ghost = np.zeros(len(wanted), bool)
            inside = place < self.n_ghosts
            is_ghost[inside] = self.ghosts[place[inside]] == wanted[inside]
            index[remote] = np.where(is_ghost, self.n_local + place, -1)
            known[remote] = is_ghost
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


def merge_numbers(
    nodes: Numbering,
    removed: NDArray[np.int64],
    partners: NDArray[np.int64],
    read: NDArray[np.int64],
) -> tuple[Numbering, NDArray[np.int32]]:
    """Number nodes again, so that each removed one has the number of its partner (collective).

    Parameters
    ----------
    removed
        Global numbers of own nodes.
    partners
        The global number of the node that takes the place of each, of any rank. It may be removed,
        too.
    read
        Global numbers that this rank reads.

    Returns
    -------
    The numbering, in the same order and without the removed nodes, and the new local index of each
    entry of `read`.
    """
    comm = nodes.comm
    pairs = np.concatenate(comm.mpi.allgather(np.column_stack([removed, partners])))
    pairs = pairs[np.argsort(pairs[:, 0])]

    def followed(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], bool]:
        place = np.minimum(np.searchsorted(pairs[:, 0], numbers), max(len(pairs) - 1, 0))
        hit = pairs[place, 0] == numbers
        return np.where(hit, pairs[place, 1], numbers), bool(hit.any())

    moved = False
    for _ in range(4):  # a corner has one partner for each axis
        pairs[:, 1], moved = followed(pairs[:, 1])
    if moved:
        raise ValueError(
            "fem.Space: periodic sides must not lead back to themselves. Name each pair of "
            "opposite sides once."
        )
    numbers = followed(read)[0]
    numbers -= np.searchsorted(pairs[:, 0], numbers)
    n_local = nodes.n_local - len(removed)
    offset = nodes.offset - int(np.searchsorted(pairs[:, 0], nodes.offset))
    foreign = (numbers < offset) | (numbers >= offset + n_local)
    merged = Numbering(n_local, np.unique(numbers[foreign]), comm)
    return merged, merged.local_index(numbers)
