"""The communicators of mpi4py that mpi4jax takes, as communicators of mpigrad."""

from __future__ import annotations

import functools

from mpi4py import MPI

from mpigrad.communicator import Communicator, world

__all__ = ["communicator"]


@functools.cache
def _keyval() -> int:
    """Return the attribute of an MPI communicator that keeps its Communicator."""
    return MPI.Comm.Create_keyval()


def communicator(comm: MPI.Intracomm | None = None) -> Communicator:
    """Return the Communicator of mpigrad that stands for a communicator of mpi4py.

    It is made at the first call, which is collective: all ranks of `comm` have to make it. Later
    calls return the same object until `comm` is freed.

    Parameters
    ----------
    comm
        An intra-communicator of mpi4py. Default: all ranks.

    Raises
    ------
    TypeError, ValueError
        If `comm` is not an intra-communicator, or this rank is not a member of it.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from mpigrad.compat.mpi4jax import communicator
    >>> part = MPI.COMM_WORLD.Split(0)
    >>> communicator(part) is communicator(part)
    True
    """
    if comm is None or comm == MPI.COMM_WORLD:
        return world()
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        return Communicator(comm)  # raises the error
    kept = comm.Get_attr(_keyval())
    if isinstance(kept, Communicator):
        return kept
    made = Communicator(comm)
    comm.Set_attr(_keyval(), made)
    return made
