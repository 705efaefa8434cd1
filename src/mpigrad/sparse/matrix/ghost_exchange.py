"""Values owned by other ranks: read forward, accumulated backward."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.collective_errors import raise_error
from mpigrad.communicator import HANDSHAKE_TAG, BlockingCall, Communicator, resolve
from mpigrad.operations import neighbor_alltoallv
from mpigrad.operations.indexing import take

__all__ = ["GhostExchange", "index_array"]


def index_array(indices: np.ndarray) -> jax.Array:
    """Indices on the device, in 32 bits where they fit, made once even inside a trace."""
    small = indices.size == 0 or int(indices.max()) < 2**31
    with jax.ensure_compile_time_eval(), jax.enable_x64(not small):
        return jnp.asarray(indices.astype(np.int32 if small else np.int64))


def _tell_owners(comm: Communicator, wanted: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Send each owner the indices wanted from it; returns what other ranks want from this one.

    Only neighbours exchange messages, though no rank knows who will ask it: a barrier that is
    entered when all own messages have been received tells when nothing more can come (Hoefler,
    Siebert & Lumsdaine, "Scalable communication protocols for dynamic sparse data exchange", 2010).
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
    """Read entries of a distributed vector, wherever they live.

    Rank r owns a contiguous stripe of the global indices: the stripes follow each other in the
    order of the ranks. Building the exchange is collective, and so is using it; its adjoint
    adds what the readers contribute to the owners' entries.

    Parameters
    ----------
    n_local
        Number of entries that this rank owns; zero is allowed, and ranks may differ.
    needed
        Global indices that this rank reads, shape (m,), in any order, repeated or not.

    Attributes
    ----------
    offset, n_global
        First index of this rank's stripe; number of entries on all ranks.
    ghosts
        Sorted indices among `needed` that other ranks own, shape (n_ghosts,).
    position
        Where each needed entry stands in what `pool` returns, shape (m,).
    """

    def __init__(self, n_local: int, needed: Any, comm: Communicator | None = None) -> None:
        self.comm = resolve(comm)
        error: Exception | None = None
        indices = np.zeros(0, np.int64)
        own = 0
        try:
            own = _count(n_local)
            indices = _indices(needed, "needed")
        except (TypeError, ValueError) as problem:
            error = problem
        raise_error(self.comm, error)

        sizes = np.zeros(self.comm.size, np.int64)
        self.comm.mpi.Allgather(np.array([own], np.int64), sizes)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        self.n_local = own
        self.offset = int(starts[self.comm.rank])
        self.n_global = int(starts[-1])
        outside = indices[(indices < 0) | (indices >= self.n_global)]
        if outside.size:
            error = ValueError(
                f"GhostExchange: index {outside[0]} is not one of the {self.n_global} entries "
                f"(0 to {self.n_global - 1}) that all ranks own together"
            )
        raise_error(self.comm, error)

        remote = (indices < self.offset) | (indices >= self.offset + own)
        self.ghosts = np.unique(indices[remote])
        self._needed_position = indices - self.offset
        self._needed_position[remote] = own + np.searchsorted(self.ghosts, indices[remote])

        # Empty stripes share their start with the next one; `right` finds the rank that has it.
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
        """Own entries that go out, packed by neighbour."""
        return index_array(self._send)

    @functools.cached_property
    def position(self) -> jax.Array:
        return index_array(self._needed_position)

    def pool(self, x: Any) -> jax.Array:
        """The own entries, followed by the ghosts: shape (n_local + n_ghosts, ...)."""
        x = self._check(x)
        if not self.neighbors:
            return x
        received = neighbor_alltoallv(
            take(x, self.send_index), self.neighbors, self.sendcounts, self.recvcounts, self.comm
        )
        return jnp.concatenate([x, received])

    def exchange(self, x: Any) -> jax.Array:
        """The needed entries.

        Parameters
        ----------
        x
            This rank's entries, shape (n_local, ...), any dtype.

        Returns
        -------
        Array of shape (len(needed), ...), in the order of `needed`.
        """
        return take(self.pool(x), self.position)

    def _check(self, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim == 0 or x.shape[0] != self.n_local:
            raise ValueError(
                f"this rank ({self.comm.rank}) owns {self.n_local} entries, but the vector has "
                f"shape {x.shape}; its leading axis must be the rank's own entries"
            )
        return x

    def __repr__(self) -> str:
        return (
            f"GhostExchange(n_local={self.n_local}, n_global={self.n_global}, "
            f"n_ghosts={len(self.ghosts)}, neighbors={self.neighbors})"
        )


def _count(n_local: Any) -> int:
    try:
        count = int(n_local.__index__())
    except (AttributeError, TypeError):
        raise TypeError(
            f"n_local must be a Python integer, the number of entries that this rank owns, "
            f"not {type(n_local).__name__}"
        ) from None
    if count < 0:
        raise ValueError(f"n_local={count} is negative; give zero for a rank without entries")
    return count


def _indices(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(
            f"{name} must be a one-dimensional array of integers, "
            f"not of shape {array.shape} and dtype {array.dtype}"
        )
    return array.astype(np.int64)
