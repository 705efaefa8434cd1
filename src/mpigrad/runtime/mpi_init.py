"""MPI starts with all ranks: one that has ended before ends the job, where MPI waits for ever."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator

from mpigrad.runtime.native_path import native_path

__all__ = ["forbid_child_import", "limit_mpi_init"]

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
# How a launcher tells a process who it is. (Not SLURM_PROCID, which a batch script has, too.)
_IDENTITY = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_JOBID", "PMI_RANK", "PMI_FD", "PMI_PORT")
# The number of the process that is a rank, and who it is: for its children.
_OURS = "MPIGRAD_PROCESS"
_GRACE = 3.0  # seconds after the limit, as a busy machine starts ranks one after the other
_TURN = 1.0  # seconds between two ranks, so that one says it


def forbid_child_import() -> None:
    """Refuse the import in a process that a rank has started.

    It has the rank's environment: MPI would take it for the rank, and the job would never end, or
    be aborted. (A job of its own, started by a launcher within a rank, has another identity.)
    """
    identity = " ".join(f"{name}={os.environ[name]}" for name in _IDENTITY if name in os.environ)
    rank, _, its_identity = os.environ.get(_OURS, "").partition(" ")
    taken = identity and identity == its_identity and rank != str(os.getpid())
    # Only a namespace is of one job alone.
    started = "PMIX_NAMESPACE" in os.environ or rank == str(os.getppid())
    if not (taken and started) or "mpi4py.MPI" in sys.modules:
        os.environ[_OURS] = f"{os.getpid()} {identity}"
        return
    # While it imports the program, a child of multiprocessing does not know its parent yet.
    spawned = getattr(multiprocessing.current_process(), "_inheriting", False)
    if not spawned:
        raise ImportError(
            f"mpigrad: this process was started by a rank (process {rank}) and is none itself, but "
            "MPI would take it for the rank. Start workers from a file that imports neither "
            "mpigrad nor mpi4py, or take the variables of the launcher (PMIX_*, OMPI_*, PMI_*) out "
            "of their environment: then it is a program of one rank"
        )
    text = (
        "mpigrad: multiprocessing has spawned this process from a rank, and it is none itself, but "
        "it imports the program of the rank, and so mpigrad. Import mpigrad and mpi4py under "
        "`if __name__ == '__main__':`, or start workers by subprocess, from a file that imports "
        "neither; ending the job"
    )
    print(text, file=sys.stderr, flush=True)
    os.kill(int(rank), signal.SIGTERM)  # a pool would start another one, for ever
    raise ImportError(text)


@contextlib.contextmanager
def limit_mpi_init() -> Iterator[None]:
    """Give the import that starts MPI the time limit MPIGRAD_TIMEOUT."""
    library = native_path("mpigrad_communication")
    rank = next((os.environ[name] for name in _RANK if name in os.environ), "")
    try:
        seconds = float(os.environ.get("MPIGRAD_TIMEOUT", "300"))
    except ValueError:
        seconds = 0.0  # an error later
    if "mpi4py.MPI" in sys.modules or not seconds > 0 or not rank.isdigit() or library is None:
        yield
        return
    native = ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)
    native.mpigrad_joining.argtypes = [ctypes.c_double, ctypes.c_char_p]
    limit = seconds + _GRACE + _TURN * min(int(rank), 15)
    text = (
        f"mpigrad: rank {rank} has waited {limit:g} s in MPI_Init, in `import mpigrad`: another "
        "rank has ended before it started MPI, or has not come so far. Import mpigrad on every "
        "rank, at the top of the program; where that takes longer, set MPIGRAD_TIMEOUT (seconds, "
        "0: no limit).\n"
    )
    native.mpigrad_joining(limit, text.encode())
    try:
        yield
    finally:
        native.mpigrad_joined()
