"""Errors that one rank finds alone, raised by all ranks together."""

from __future__ import annotations

from mpi4py import MPI

from mpigrad.communicator import Communicator

__all__ = ["raise_together"]


def raise_together(comm: Communicator, error: Exception | None) -> None:
    """Raise on every rank the error of the lowest rank that brings one (collective).

    The message gains the rank where it is not its own, so that all ranks say the same.
    """
    first = comm.mpi.allreduce(comm.size if error is None else comm.rank, op=MPI.MIN)
    if first == comm.size:
        return
    kind, message = comm.mpi.bcast((type(error), str(error)), root=first)
    raise kind(f"{message} (found on rank {first})")
