"""Start a process as a rank, once, at the import of mpigrad.

This is not lazy, because making the default communicator is collective: ranks that send messages
would wait for a rank that never does. Only the process of the `mpigrad` command waits until it uses
a name, because it starts ranks and is not one of them.
"""

from __future__ import annotations

import functools
import sys
import traceback

__all__ = ["start"]


def _end_other_ranks() -> None:
    """End all ranks if the program has started MPI itself: the others would wait for this one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.size > 1:
        traceback.print_exc()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


@functools.cache
def start() -> None:
    """Start MPI, the guard and the default communicator (collective, once)."""
    from mpigrad.runtime.processor import check_processor
    from mpigrad.runtime.world import limit_mpi_init

    try:
        check_processor()
    except ImportError:
        _end_other_ranks()
        raise
    try:
        with limit_mpi_init():
            from mpi4py import MPI  # first: it initialises MPI with MPI_THREAD_MULTIPLE
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError):
            raise
        from mpigrad.runtime.mpi_library import no_mpi_text

        raise ImportError(no_mpi_text(str(error).splitlines()[-1])) from None

    from mpigrad.runtime.world import check_world

    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise ImportError(
            "mpigrad: expected an initialised MPI, but MPI is not initialised or has been "
            "finalized. Do not change mpi4py.rc.initialize, or call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE) before mpigrad is imported."
        )
    check_world(MPI.COMM_WORLD.size)

    from mpigrad import guard

    guard.end_all_on_errors()  # before the imports below, whose errors must end all ranks, too

    from mpigrad.runtime.mpi_library import check_gpu_aware

    check_gpu_aware()

    from mpigrad import compilation
    from mpigrad.autodiff import self_check  # noqa: F401  the module registers the check
    from mpigrad.communicator import default_communicator
    from mpigrad.operations import _jax_compat, _jax_private
    from mpigrad.profiling import trace

    _jax_private.check_version(MPI.COMM_WORLD.rank)
    _jax_compat.configure_backend(MPI.COMM_WORLD.size)
    guard.install()
    compilation.install()
    default_communicator()
    trace.start()
    guard.forget_import()
