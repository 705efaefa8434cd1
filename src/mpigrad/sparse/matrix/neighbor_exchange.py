"""Messages between neighbours that Python sends to make a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpigrad.communicator import SWAP_TAG, BlockingCall, Communicator

__all__ = ["exchange_with_neighbors", "split_by_counts"]


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
