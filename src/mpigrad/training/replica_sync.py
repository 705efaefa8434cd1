"""Synchronization of replicas: check that they fit, and copy rank 0's state to all ranks."""

from __future__ import annotations

import sys

import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.training.replica import Replica

__all__ = ["bcast_bytes", "check_settings", "synchronize", "warn_if_replicas_differ"]

_PIECE = 1 << 30  # bytes in a message: counts of MPI are 32 bits
_SHOWN = 100  # characters of a setting that an error shows


def synchronize(replica: Replica, comm: Communicator) -> None:
    """Copy rank 0's parameters, buffers and optimizer state to all replicas (collective).

    Raises
    ------
    ValueError
        On every rank, if names, shapes or dtypes of parameters, or the optimizers, differ.
    """
    everywhere = comm.mpi.allgather(replica.parameters)
    for rank, theirs in enumerate(everywhere):
        ours = everywhere[0]
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                raise ValueError(
                    f"trainer: parameters must be the same on all ranks, got {a} on rank 0 and {b} "
                    f"on rank {rank}. Build the same model on all ranks."
                )
        if len(ours) != len(theirs):
            more, fewer = (0, rank) if len(ours) > len(theirs) else (rank, 0)
            extra = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
            raise ValueError(
                f"trainer: parameters must be the same on all ranks, but rank {more} has {extra} "
                f"and rank {fewer} does not. Build the same model on all ranks."
            )
    check_settings(replica, comm)
    warn_if_replicas_differ(
        replica, comm, "differed from rank 0's. All ranks now start with rank 0's"
    )
    state = b""
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            state = replica.state()
    state = bcast_bytes(comm, state)
    with raise_on_all_ranks(comm):
        if comm.rank > 0:
            replica.load(state)


def check_settings(replica: Replica, comm: Communicator) -> None:
    """Raise a ValueError on every rank if the optimizers, or their settings, differ."""
    own: dict[str, str] = {}
    with raise_on_all_ranks(comm):
        own = replica.settings()
    settings = comm.mpi.allgather(own)
    for rank, theirs in enumerate(settings):
        for name in {**settings[0], **theirs}:
            a, b = settings[0].get(name), theirs.get(name)
            if a != b:
                raise ValueError(
                    f"trainer: the optimizer must be the same on all ranks, got {name} = "
                    f"{_short(a)} on rank 0 and {_short(b)} on rank {rank}. Make and change the "
                    "optimizer in the same way on all ranks."
                )


def warn_if_replicas_differ(replica: Replica, comm: Communicator, message: str) -> None:
    """Print on rank 0 which ranks have parameters or buffers with other bits (collective)."""
    prints = comm.mpi.allgather(replica.fingerprint())
    others = [str(rank) for rank, value in enumerate(prints) if value != prints[0]]
    if others and comm.rank == 0:
        print(
            f"mpigrad: trainer: the parameters of rank{'s' * (len(others) > 1)} "
            f"{', '.join(others)} {message}",
            file=sys.stderr,
            flush=True,
        )


def _short(text: str | None) -> str:
    return "none" if text is None else text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def bcast_bytes(comm: Communicator, data: bytes, root: int = 0) -> bytes:
    """Broadcast the root's bytes, of any length (collective)."""
    size = comm.mpi.bcast(len(data), root)
    memory = np.frombuffer(data, np.uint8) if comm.rank == root else np.empty(size, np.uint8)
    for start in range(0, size, _PIECE):
        comm.mpi.Bcast(memory[start : start + _PIECE], root)
    return data if comm.rank == root else memory.tobytes()
