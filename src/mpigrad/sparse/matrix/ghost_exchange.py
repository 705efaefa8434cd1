"""Values of other ranks: read in the forward pass, accumulated in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.collective_errors import raise_error
from mpigrad.communicator import HANDSHAKE_TAG, SWAP_TAG, BlockingCall, Communicator, resolve
from mpigrad.extend import as_array, index_array, jit_local, keep_in_order, take, tie_in
from mpigrad.operations import neighbor_alltoallv

__all__ = [
    "GhostExchange",
    "exchange_with_neighbors",
    "split_by_counts",
]

# ---- Messages between neighbours that Python sends to make a plan ----


def split_by_counts(array: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """Split an array into pieces of these lengths."""
    return np.split(array, np.cumsum(counts)[:-1]) if len(counts) else []


def exchange_with_neighbors(
    comm: Communicator,
    neighbors: Sequence[int],
    messages: Sequence[np.ndarray],
    counts: Sequence[int],
    task: str,
) -> list[np.ndarray]:
    """Send each neighbour its array of integers, and receive `counts` integers from each.

    All ranks of the communicator call it, also ranks without neighbours, in the same order. `task`
    names the work for the watchdog.
    """
    received = [np.empty(count, np.int64) for count in counts]
    with BlockingCall(task):
        requests = [
            comm.derivatives.Irecv(array, rank, SWAP_TAG)
            for rank, array in zip(neighbors, received, strict=True)
        ]
        requests += [
            comm.derivatives.Isend(np.ascontiguousarray(message, np.int64), rank, SWAP_TAG)
            for rank, message in zip(neighbors, messages, strict=True)
        ]
        MPI.Request.Waitall(requests)
    return received


# ---- Values of other ranks: read in the forward pass, accumulated in the backward pass ----


def _tell_owners(comm: Communicator, wanted: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Send each owner the indices wanted from it, and return the indices wanted from this rank.

    Only neighbours exchange messages, although no rank knows its readers before. A rank enters a
    non-blocking barrier when its own messages have been received. When the barrier ends, no more
    messages can come (Hoefler, Siebert & Lumsdaine, "Scalable communication protocols for dynamic
    sparse data exchange", 2010).
    """
    mpi = comm.derivatives
    requests = [mpi.Issend(indices, owner, HANDSHAKE_TAG) for owner, indices in wanted.items()]
    asked: dict[int, np.ndarray] = {}
    barrier: MPI.Request | None = None
    status = MPI.Status()
    while True:
        message = mpi.Improbe(MPI.ANY_SOURCE, HANDSHAKE_TAG, status)
        if message is not None:
            source = status.Get_source()
            asked[source] = np.empty(status.Get_count(MPI.INT64_T), np.int64)
            message.Recv(asked[source])
        if barrier is None:
            if MPI.Request.Testall(requests):
                barrier = mpi.Ibarrier()
        elif barrier.Test():
            return asked


class GhostExchange:
    """Read entries of a distributed vector that any rank may own.

    Rank r owns a contiguous stripe of the global indices. The stripes follow each other in the
    order of the ranks. Building the exchange is collective, and so is using it. Its adjoint adds
    the readers' cotangents to the owners' entries.

    Parameters
    ----------
    n_local
        The number of entries that this rank owns. It may be zero, and may differ between ranks.
    needed
        The global indices that this rank reads, shape (m,), in any order, repeated or not.
    comm
        The communicator over whose ranks the vector is distributed. None: the default communicator.

    Attributes
    ----------
    offset, n_global
        The first index of this rank's stripe, and the number of entries on all ranks.
    ghosts
        The sorted indices among `needed` that other ranks own, shape (n_ghosts,).
    position
        The position of each needed entry in the result of `local_and_ghost`, shape (m,).

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is not an integer or an index is out of range.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import GhostExchange
    >>> exchange = GhostExchange(3, [2, 0, 2])
    >>> exchange.exchange(jnp.array([10.0, 11.0, 12.0]))
    Array([12., 10., 12.], dtype=float32)
    """

    def __init__(self, n_local: int, needed: Any, comm: Communicator | None = None) -> None:
        self.comm = resolve(comm)
        error: Exception | None = None
        indices = np.zeros(0, np.int64)
        n_entries = 0
        try:
            n_entries = _count(n_local, "GhostExchange")
            indices = _indices(needed, "GhostExchange", "needed")
        except (TypeError, ValueError) as problem:
            error = problem
        raise_error(self.comm, error)

        sizes = np.zeros(self.comm.size, np.int64)
        self.comm.mpi.Allgather(np.array([n_entries], np.int64), sizes)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        self.n_local = n_entries
        self.offset = int(starts[self.comm.rank])
        self.n_global = int(starts[-1])
        outside = indices[(indices < 0) | (indices >= self.n_global)]
        if outside.size:
            error = ValueError(
                f"GhostExchange: needed holds index {outside[0]}, but the ranks own "
                f"{self.n_global} entries in total (0 to {self.n_global - 1}). Give global indices."
            )
        raise_error(self.comm, error)

        remote = (indices < self.offset) | (indices >= self.offset + n_entries)
        self.ghosts = np.unique(indices[remote])
        self._needed_position = indices - self.offset
        self._needed_position[remote] = n_entries + np.searchsorted(self.ghosts, indices[remote])

        # Empty stripes share their start with the next one. `right` finds the rank that owns it.
        owners = np.searchsorted(starts, self.ghosts, side="right") - 1
        wanted = {int(rank): self.ghosts[owners == rank] for rank in np.unique(owners)}
        with BlockingCall("the making of a GhostExchange"):
            asked = _tell_owners(self.comm, wanted)
        self.neighbors = tuple(sorted({*wanted, *asked}))
        empty = np.zeros(0, np.int64)
        sends = [asked.get(rank, empty) for rank in self.neighbors]
        self.sendcounts = tuple(len(part) for part in sends)
        self.recvcounts = tuple(len(wanted.get(rank, empty)) for rank in self.neighbors)
        self._send = np.concatenate([*sends, empty]) - self.offset
        self.comm.mpi.Barrier()  # no rank starts another handshake while one still probes

    @functools.cached_property
    def send_index(self) -> jax.Array:
        """Positions of own entries that are sent, packed by neighbour."""
        return index_array(self._send)

    @functools.cached_property
    def position(self) -> jax.Array:
        """Position of each needed entry in the result of `local_and_ghost`."""
        return index_array(self._needed_position)

    def local_and_ghost(self, x: Any) -> jax.Array:
        """Return the own entries, followed by the ghosts: shape (n_local + n_ghosts, ...)."""
        x = self._check(x)
        if not self.neighbors:
            return x
        received = neighbor_alltoallv(
            take(x, self.send_index), self.neighbors, self.sendcounts, self.recvcounts, self.comm
        )
        return _joined(x, received)

    def accumulate(self, x: Any) -> jax.Array:
        """Add the ghosts' entries of all ranks to those of their owners (collective).

        It is the adjoint of `local_and_ghost`, and differentiable.

        Parameters
        ----------
        x
            Own entries followed by ghosts, shape (n_local + n_ghosts, ...).

        Returns
        -------
        The sums of this rank's own entries, shape (n_local, ...).

        Examples
        --------
        >>> import jax.numpy as jnp
        >>> from mpigrad.sparse import GhostExchange
        >>> GhostExchange(2, [0, 1]).accumulate(jnp.array([1.0, 2.0]))
        Array([1., 2.], dtype=float32)
        """
        x = as_array(x)
        n = self.n_local
        if x.ndim == 0 or x.shape[0] != n + len(self.ghosts):
            raise ValueError(
                f"GhostExchange.accumulate: rank {self.comm.rank} has {n} entries and "
                f"{len(self.ghosts)} ghosts, but x has shape {x.shape}. Give the entries of both "
                "along the leading axis."
            )
        if not self.neighbors:
            return x
        # A rank without ghosts would wait for the others first, and compute its entries afterwards.
        local, ghosts = _divided(keep_in_order(x), n)
        received = neighbor_alltoallv(
            ghosts, self.neighbors, self.recvcounts, self.sendcounts, self.comm
        )
        return _added(local, self.send_index, received)

    def exchange(self, x: Any) -> jax.Array:
        """Return the needed entries (collective).

        Parameters
        ----------
        x
            This rank's entries, shape (n_local, ...), of any dtype.

        Returns
        -------
        An array of shape (len(needed), ...), in the order of `needed`.
        """
        return take(self.local_and_ghost(x), self.position)

    def _check(self, x: Any) -> jax.Array:
        x = as_array(x)
        if x.ndim == 0 or x.shape[0] != self.n_local:
            raise ValueError(
                f"GhostExchange: rank {self.comm.rank} owns {self.n_local} entries, but x has "
                f"shape {x.shape}. Give this rank's entries along the leading axis."
            )
        return x

    def __repr__(self) -> str:
        return (
            f"GhostExchange(n_local={self.n_local}, n_global={self.n_global}, "
            f"n_ghosts={len(self.ghosts)}, neighbors={self.neighbors})"
        )


def ghost_values(ghosts: GhostExchange, x: Any) -> jax.Array | None:
    """Return the ghost entries alone, so that own entries are not copied."""
    if not ghosts.neighbors:
        return None
    x = as_array(x)
    return neighbor_alltoallv(
        take(x, ghosts.send_index),
        ghosts.neighbors,
        ghosts.sendcounts,
        ghosts.recvcounts,
        ghosts.comm,
    )


@jit_local
def _joined(local: jax.Array, ghosts: jax.Array) -> jax.Array:
    return jnp.concatenate([local, ghosts])


@jit_local(static_argnames=("n",))
def _divided(x: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    return x[:n], x[n:]


@jit_local
def _added(local: jax.Array, index: jax.Array, received: jax.Array) -> jax.Array:
    if not len(index):
        return tie_in(local, received)
    return local.at[index].add(received, mode="promise_in_bounds")


def _count(n_local: Any, name: str, argument: str = "n_local") -> int:
    try:
        count = int(n_local.__index__())
    except (AttributeError, TypeError):
        raise TypeError(
            f"{name}: {argument} must be a Python integer, the number of entries that this rank "
            f"owns, got {type(n_local).__name__}. Convert it with int(...)."
        ) from None
    if count < 0:
        raise ValueError(
            f"{name}: {argument} must not be negative, got {argument}={count}. Give zero on a rank "
            "without entries."
        )
    return count


def _indices(values: Any, name: str, argument: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(
            f"{name}: {argument} must be a one-dimensional array of integers, got shape "
            f"{array.shape} and dtype {array.dtype}. Give global indices."
        )
    return array.astype(np.int64, copy=False)
