"""Start a process as a rank, once.

A process that a launcher serves starts at the import of mpigrad, because making the default
communicator is collective: ranks that send messages would wait for a rank that never does. Others
are one rank each. They start when they first use a name, so `import mpigrad` alone starts no MPI.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Sequence

from mpigrad.runtime.world import (
    check_world,
    hide_launcher,
    is_command,
    is_served,
    limit_mpi_init,
)

__all__ = ["start", "start_later", "starts_at_import"]

_MPI = "mpi4py.MPI"
# Cray's MPICH ends a process that no launcher serves, as on login nodes.
_VENDORS = ("CRAY_MPICH_VERSION", "CRAY_MPICH_DIR", "PE_MPICH_VERSION")
_TRIAL = 30.0  # seconds for the trial of such an MPI


def starts_at_import() -> bool:
    """Return whether this process is a rank of a launcher, or has started MPI itself.

    The process of the `mpigrad` command starts ranks, and is not one of them.
    """
    return not is_command() and (_MPI in sys.modules or is_served())


def start_later() -> None:
    """Let the program's own `from mpi4py import MPI` start MPI as `start` does."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The module mpi4py.MPI, which starts MPI."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MPI:
            return None
        _start_mpi()
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules[_MPI]

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has been executed."""


def _end_other_ranks() -> None:
    """End all ranks if the program has started MPI itself: the others would wait for this one."""
    mpi = sys.modules.get(_MPI)
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.size > 1:
        traceback.print_exc()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


def _load_mpi() -> None:
    """Import mpi4py.MPI, which initialises MPI with MPI_THREAD_MULTIPLE."""
    from mpi4py import MPI  # noqa: F401


def _start_mpi() -> None:
    """Start MPI: that of the launcher, or of one rank."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    if _MPI in sys.modules:
        return
    if is_served():
        with limit_mpi_init():
            return _load_mpi()
    with hide_launcher():
        if any(name in os.environ for name in _VENDORS) and not _starts_alone():
            return _load_mpi_of_one_rank()
        try:
            return _load_mpi()
        except RuntimeError as error:
            if "cannot load MPI library" not in str(error):
                raise
        return _load_mpi_of_one_rank()


def _starts_alone() -> bool:
    """Return whether MPI starts one rank, tried in a process of its own: it may end that."""
    command = [sys.executable, "-c", "import mpi4py.MPI"]
    try:
        trial = subprocess.run(command, capture_output=True, timeout=_TRIAL, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return trial.returncode == 0


def _load_mpi_of_one_rank() -> None:
    """Import mpi4py.MPI on the MPI of one rank (native/one_rank)."""
    from mpigrad.runtime.processor import native_path

    library, name = native_path("mpigrad_one_rank"), "MPI4PY_LIBMPI"
    if library is None:
        return _load_mpi()
    before = os.environ.get(name)
    os.environ[name] = str(library)
    try:
        return _load_mpi()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@functools.cache
def start() -> None:
    """Start MPI, the guard and the default communicator (collective, once)."""
    from mpigrad.runtime.processor import check_processor

    try:
        check_processor()
    except ImportError:
        _end_other_ranks()
        raise
    try:
        _start_mpi()
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError):
            raise
        from mpigrad.runtime.mpi_library import no_mpi_text

        raise ImportError(no_mpi_text(str(error).splitlines()[-1])) from None
    from mpi4py import MPI

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
