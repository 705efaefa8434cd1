"""The start of MPI: a time limit for MPI_Init, and an error in child processes of a rank."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator

from mpigrad.runtime.processor import native_path

__all__ = ["forbid_child_import", "limit_mpi_init"]

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
# Variables by which a launcher identifies a rank. (Not SLURM_PROCID: a batch script also has it.)
_IDENTITY = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_JOBID", "PMI_RANK", "PMI_FD", "PMI_PORT")
# The process id and identity of a rank, for its children.
_PARENT = "MPIGRAD_PROCESS"
_GRACE = 3.0  # seconds added to the limit: a busy machine starts ranks one after the other
_STAGGER = 1.0  # seconds between the limits of two ranks, so that one rank reports


def forbid_child_import() -> None:
    """Raise an error if a child process of a rank imports mpigrad.

    The child inherits the rank's environment, so MPI would treat it as that rank, and the job would
    never end or be aborted. (A separate job that a launcher starts within a rank has another
    identity.)
    """
    identity = " ".join(f"{name}={os.environ[name]}" for name in _IDENTITY if name in os.environ)
    rank, _, its_identity = os.environ.get(_PARENT, "").partition(" ")
    taken = identity and identity == its_identity and rank != str(os.getpid())
    # Only a PMIx namespace is unique to one job.
    started = "PMIX_NAMESPACE" in os.environ or rank == str(os.getppid())
    if not (taken and started) or "mpi4py.MPI" in sys.modules:
        os.environ[_PARENT] = f"{os.getpid()} {identity}"
        return
    # multiprocessing sets this while a spawned child imports the program.
    spawned = getattr(multiprocessing.current_process(), "_inheriting", False)
    if not spawned:
        raise ImportError(
            f"mpigrad: imported in a child of MPI process {rank}. The child inherits the "
            "launcher's variables (PMIX_*, OMPI_*, PMI_*), so MPI would treat it as the same rank. "
            "Start it from a file that imports neither mpigrad nor mpi4py, or without these "
            "variables: then it is a program of one rank."
        )
    text = (
        f"mpigrad: imported in a process that multiprocessing spawned from MPI process {rank}; "
        "ending the job. MPI would treat the child as the same rank. Import mpigrad and mpi4py "
        "under `if __name__ == '__main__':`, or start workers with subprocess from a file that "
        "imports neither."
    )
    print(text, file=sys.stderr, flush=True)
    os.kill(int(rank), signal.SIGTERM)  # a pool would start new processes without end
    raise ImportError(text)


@contextlib.contextmanager
def limit_mpi_init() -> Iterator[None]:
    """Limit the time of the import that starts MPI to MPIGRAD_TIMEOUT."""
    library = native_path("mpigrad_communication")
    rank = next((os.environ[name] for name in _RANK if name in os.environ), "")
    try:
        seconds = float(os.environ.get("MPIGRAD_TIMEOUT", "300"))
    except ValueError:
        seconds = 0.0  # reported later
    if "mpi4py.MPI" in sys.modules or not seconds > 0 or not rank.isdigit() or library is None:
        yield
        return
    native = ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)
    native.mpigrad_start_time_limit.argtypes = [ctypes.c_double, ctypes.c_char_p]
    limit = seconds + _GRACE + _STAGGER * min(int(rank), 15)
    text = (
        f"mpigrad: rank {rank} has waited {limit:g} s in MPI_Init, in `import mpigrad`: another "
        "rank ended before it started MPI, or has not started MPI yet. Import mpigrad on every "
        "rank, at the top of the program. If that takes longer, set MPIGRAD_TIMEOUT (seconds, 0: "
        "no limit).\n"
    )
    native.mpigrad_start_time_limit(limit, text.encode())
    try:
        yield
    finally:
        native.mpigrad_stop_time_limit()
