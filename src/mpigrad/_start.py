"""What makes a process a rank, once, at the import of mpigrad.

It is eager, because making the default communicator is collective: a rank that never sends a
message would otherwise be waited for by those that do. Only the process of the `mpigrad` command,
which starts ranks and is not one of them, waits until it uses something.
"""

from __future__ import annotations

import functools

__all__ = ["start"]


@functools.cache
def start() -> None:
    """Start MPI, the guard and the default communicator (collective, once)."""
    from mpigrad.runtime.mpi_init import limit_mpi_init

    with limit_mpi_init():
        from mpi4py import MPI  # first: it initialises MPI with MPI_THREAD_MULTIPLE

    from mpigrad.runtime.world import check_world

    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise ImportError(
            "mpigrad: MPI is not initialised here. Leave mpi4py.rc.initialize as it is, or call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE) before mpigrad is imported."
        )
    check_world(MPI.COMM_WORLD.size)

    from mpigrad import guard

    guard.end_all_on_errors()  # those of what is imported here, too

    from mpigrad.autodiff import self_check  # noqa: F401  it registers itself
    from mpigrad.communicator import default_communicator
    from mpigrad.operations import _jax_compat, _jax_private
    from mpigrad.profiling import trace

    _jax_private.check_version(MPI.COMM_WORLD.rank)
    _jax_compat.configure_backend(MPI.COMM_WORLD.size)
    guard.install()
    default_communicator()
    trace.start()
