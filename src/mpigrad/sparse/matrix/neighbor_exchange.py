"""Messages between neighbours that Python sends while it makes a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpigrad.communicator import SWAP_TAG, BlockingCall, Communicator

__all__ = ["parts", "swap"]


def parts(array: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    """`array` cut into pieces of these lengths."""
    return np.split(array, np.cumsum(counts)[:-1]) if len(counts) else []


def swap(
    comm: Communicator,
    neighbors: Sequence[int],
    messages: Sequence[np.ndarray],
    counts: Sequence[int],
    what: str,
) -> list[np.ndarray]:
    """Send each neighbour its array of integers; receive `counts` integers from each.

    All ranks of the communicator take part, those without neighbours too, in the same order.
    """
    received = [np.empty(count, np.int64) for count in counts]
    with BlockingCall(what):
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
