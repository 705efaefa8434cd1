"""MPI starts with all ranks: one that has ended before ends the job, where MPI waits for ever."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pathlib
import signal
import sys
from collections.abc import Iterable, Iterator

__all__ = ["joining", "refuse_spawned"]

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_OURS = "MPIGRAD_PROCESS"  # the number of the process that is a rank, for its children
_GRACE = 3.0  # seconds after the limit, as a busy machine starts ranks one after the other
_TURN = 1.0  # seconds between two ranks, so that one says it


def refuse_spawned() -> None:
    """End the job where a rank's child, spawned by multiprocessing, imports the rank's program.

    MPI would take it for the rank and abort it; a pool starts another one in its place, for ever.
    """
    # While it imports the program, a child does not know its parent yet.
    spawned = getattr(multiprocessing.current_process(), "_inheriting", False)
    parent = os.getppid()
    if not spawned or os.environ.get(_OURS) != str(parent) or "mpi4py.MPI" in sys.modules:
        os.environ[_OURS] = str(os.getpid())
        return
    text = (
        "mpigrad: multiprocessing has spawned this process from a rank, and it is none itself, but "
        "it imports the program of the rank, and so mpigrad. Import mpigrad and mpi4py under "
        "`if __name__ == '__main__':`, or start workers by subprocess, from a file that imports "
        "neither; ending the job"
    )
    print(text, file=sys.stderr, flush=True)
    os.kill(parent, signal.SIGTERM)
    raise ImportError(text)


@contextlib.contextmanager
def joining(folders: Iterable[str]) -> Iterator[None]:
    """Around the import that starts MPI, with MPIGRAD_TIMEOUT as its limit.

    Parameters
    ----------
    folders
        Of this package, in one of which the native library is.
    """
    places = [pathlib.Path(f) / "_native" / "libmpigrad_communication.so" for f in folders]
    library = next((place for place in places if place.exists()), None)
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
