"""Values in the order of a file on one rank, and in the order of the ranks: differentiable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mpigrad.communicator import Communicator, check_rank
from mpigrad.operations import neighbor_alltoallv
from mpigrad.operations.indexing import take
from mpigrad.sparse.matrix.ghost_exchange import index_array

__all__ = ["FileOrder"]


@dataclass(frozen=True)
class _Orders:
    """On the root: the ids of all ranks in a row, and the position of each id in it."""

    counts: tuple[int, ...]
    ids: jax.Array
    places: jax.Array


class FileOrder:
    """Translate between the numbers of a file, on one rank, and entries of all ranks.

    Parameters
    ----------
    comm
        The communicator.
    ids
        The number in the file of each entry of this rank, shape (n_local,), int64.
    """

    def __init__(self, comm: Communicator, ids: NDArray[np.int64]) -> None:
        self.comm = comm
        self.ids = ids
        self._orders: dict[int, _Orders] = {}

    def scatter(self, x: Any, root: int, function: str) -> jax.Array:
        """Return this rank's rows of the root's array (collective)."""
        root = check_rank(root, self.comm, f"{function}: root")
        orders = self._of(root)
        x = jnp.asarray(x)
        n = sum(orders.counts)
        if x.ndim == 0 or (self.comm.rank == root and x.shape[0] != n):
            raise ValueError(
                f"{function}: x must have {n} rows on the root, got shape {x.shape} on rank "
                f"{self.comm.rank}. Give one row for each entry of the file."
            )
        own = (len(self.ids),)
        if self.comm.rank == root:
            received = [n if rank == root else 0 for rank, n in enumerate(orders.counts)]
            neighbors = range(self.comm.size)
            return neighbor_alltoallv(
                take(x, orders.ids, unique=True), neighbors, orders.counts, received, self.comm
            )
        return neighbor_alltoallv(x[:0], (root,), (0,), own, self.comm)

    def gather(self, x: Any, root: int, function: str) -> jax.Array:
        """Return the rows of all ranks in the order of the file on the root (collective)."""
        root = check_rank(root, self.comm, f"{function}: root")
        orders = self._of(root)
        x = jnp.asarray(x)
        own = len(self.ids)
        if x.ndim == 0 or x.shape[0] != own:
            raise ValueError(
                f"{function}: x must have {own} rows, got shape {x.shape} on rank "
                f"{self.comm.rank}. Give one row for each entry of this rank."
            )
        if self.comm.rank == root:
            sent = [own if rank == root else 0 for rank in range(self.comm.size)]
            rows = neighbor_alltoallv(x, range(self.comm.size), sent, orders.counts, self.comm)
            return take(rows, orders.places, unique=True)
        return neighbor_alltoallv(x, (root,), (own,), (0,), self.comm)

    def _of(self, root: int) -> _Orders:
        """Gather the ids of all ranks on the root at the first use (collective)."""
        if root not in self._orders:
            parts = self.comm.mpi.gather(self.ids, root)
            if parts is None:
                empty = index_array(np.zeros(0, np.int64))
                self._orders[root] = _Orders((), empty, empty)
            else:
                ids = np.concatenate(parts)
                self._orders[root] = _Orders(
                    tuple(map(len, parts)), index_array(ids), index_array(np.argsort(ids))
                )
        return self._orders[root]
