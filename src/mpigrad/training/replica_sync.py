"""Replicas that begin equal: checked, and made so from rank 0's."""

from __future__ import annotations

import sys

import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.training.replica import Replica

__all__ = ["bcast_bytes", "check_settings", "make_equal", "warn_if_different"]

_PIECE = 1 << 30  # bytes in a message: counts of MPI are 32 bits
_SHOWN = 100  # characters of a setting that an error shows


def make_equal(replica: Replica, comm: Communicator) -> None:
    """Give all replicas rank 0's parameters, buffers and optimizer state (collective).

    Raises
    ------
    ValueError
        On every rank: names, shapes or dtypes of parameters, or the optimizers, differ.
    """
    everywhere = comm.mpi.allgather(replica.parameters)
    for rank, theirs in enumerate(everywhere):
        ours = everywhere[0]
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                raise ValueError(
                    f"trainer: parameters differ between ranks: {a} on rank 0, {b} on rank {rank}; "
                    "build the same model on all ranks"
                )
        if len(ours) != len(theirs):
            more, fewer = (0, rank) if len(ours) > len(theirs) else (rank, 0)
            extra = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
            raise ValueError(
                f"trainer: parameters differ between ranks: rank {more} has {extra}, rank {fewer} "
                "has not; build the same model on all ranks"
            )
    check_settings(replica, comm)
    warn_if_different(replica, comm, "were not rank 0's; all ranks begin with rank 0's")
    state = b""
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            state = replica.state()
    state = bcast_bytes(comm, state)
    with raise_on_all_ranks(comm):
        if comm.rank > 0:
            replica.load(state)


def check_settings(replica: Replica, comm: Communicator) -> None:
    """Raise a ValueError on every rank where the optimizers, or their numbers, differ."""
    own: dict[str, str] = {}
    with raise_on_all_ranks(comm):
        own = replica.settings()
    settings = comm.mpi.allgather(own)
    for rank, theirs in enumerate(settings):
        for name in {**settings[0], **theirs}:
            a, b = settings[0].get(name), theirs.get(name)
            if a != b:
                raise ValueError(
                    f"trainer: the optimizer differs between ranks: {name} is {_short(a)} on rank "
                    f"0, {_short(b)} on rank {rank}; make, and change, it alike on all ranks"
                )


def warn_if_different(replica: Replica, comm: Communicator, said: str) -> None:
    """Rank 0 says whose parameters or buffers are not, bit for bit, its own (collective)."""
    prints = comm.mpi.allgather(replica.fingerprint())
    others = [str(rank) for rank, value in enumerate(prints) if value != prints[0]]
    if others and comm.rank == 0:
        print(
            f"mpigrad: trainer: the parameters of rank{'s' * (len(others) > 1)} "
            f"{', '.join(others)} {said}",
            file=sys.stderr,
            flush=True,
        )


def _short(text: str | None) -> str:
    return "none" if text is None else text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def bcast_bytes(comm: Communicator, data: bytes, root: int = 0) -> bytes:
    """The root's bytes, of any number, on every rank (collective)."""
    size = comm.mpi.bcast(len(data), root)
    memory = np.frombuffer(data, np.uint8) if comm.rank == root else np.empty(size, np.uint8)
    for start in range(0, size, _PIECE):
        comm.mpi.Bcast(memory[start : start + _PIECE], root)
    return data if comm.rank == root else memory.tobytes()
