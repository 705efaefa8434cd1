"""Start a process as a rank, once.

A process that a launcher serves starts at the import of mpigrad, because making the default
communicator is collective: ranks that send messages would wait for a rank that never does. Others
are one rank each. They start when they first use a name, so `import mpigrad` alone starts no MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Sequence

from mpigrad.runtime.world import (
    MPIError,
    check_system,
    check_world,
    hide_launcher,
    is_command,
    is_served,
    limit_mpi_init,
)

__all__ = ["start", "start_later", "starts_at_import"]

_MPI = "mpi4py.MPI"
# Parts of mpigrad that can be imported without a rank.
_WITHOUT_RANK = {"_lazy", "_start", "_version", "launch", "runtime", "solution", "__main__"}
_lock = threading.RLock()
_begun = False
_loading = False  # MPI
# Cray's MPICH ends a process that no launcher serves, as on login nodes.
_VENDORS = ("CRAY_MPICH_VERSION", "CRAY_MPICH_DIR", "PE_MPICH_VERSION")
_TRIAL = 30.0  # seconds for the trial of such an MPI


def starts_at_import() -> bool:
    """Return whether this process is a rank of a launcher, or has started MPI itself.

    The process of the `mpigrad` command starts ranks, and is not one of them.
    """
    return not is_command() and (_MPI in sys.modules or is_served())


def start_later() -> None:
    """Start the rank when the program imports a part of mpigrad, and MPI with its own import."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The module mpi4py.MPI, which starts MPI. Before parts of mpigrad it starts the rank."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, part = fullname.partition(".")
        if package == "mpigrad" and "." not in part and part not in _WITHOUT_RANK:
            if not is_command():
                start()
            return None
        if fullname != _MPI or _loading:
            return None
        with _lock:
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
    """Start MPI, once: that of the launcher, or of one rank."""
    global _loading
    if _MPI in sys.modules:
        return
    _loading = True
    try:
        _load_some_mpi()
    finally:
        _loading = False


def _load_some_mpi() -> None:
    """Import mpi4py.MPI with the MPI of the launcher, or of one rank."""
    if is_served():
        with limit_mpi_init():
            return _load_mpi()
    with hide_launcher(), _same_environment():
        if any(name in os.environ for name in _VENDORS) and not _starts_alone():
            return _load_mpi_of_one_rank()
        try:
            return _load_mpi()
        except RuntimeError as error:
            if "cannot load MPI library" not in str(error):
                raise
        return _load_mpi_of_one_rank()


@contextlib.contextmanager
def _same_environment() -> Iterator[None]:
    """Take back the variables that MPI sets.

    Open MPI's single rank sets those of a launcher, out of sight of `os.environ`. A job that the
    program starts would take them for its own.
    """
    before = _variables()
    try:
        yield
    finally:
        for name in _variables() - before:
            os.unsetenv(name)


def _variables() -> set[bytes]:
    """Return the names of the variables in C's environment."""
    array = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    entries = itertools.takewhile(bool, (array[i] for i in itertools.count()))
    return {entry.partition(b"=")[0] for entry in entries}


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


def start() -> None:
    """Start MPI, the guard and the default communicator (collective, once)."""
    global _begun
    with _lock:
        if _begun:
            return
        _begun = True
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        try:
            _start()
        except BaseException:
            _begun = False  # the next use raises the error, too
            raise


def _start() -> None:
    try:
        check_system()
    except MPIError as error:
        raise ImportError(str(error)) from None
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

        raise ImportError(no_mpi_text((str(error).splitlines() or ["no text"])[-1])) from None
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
