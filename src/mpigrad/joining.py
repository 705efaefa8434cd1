"""MPI starts with all ranks: one that has ended before ends the job, where MPI waits for ever."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator

__all__ = ["joining"]

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_TURN = 1.0  # seconds between two ranks, so that one says it


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
    text = (
        f"mpigrad: rank {rank} has waited {seconds:g} s in MPI_Init, in `import mpigrad`: another "
        "rank has ended before it started MPI, or has not come so far. Import mpigrad on every "
        "rank, at the top of the program; where that takes longer, set MPIGRAD_TIMEOUT (seconds, "
        "0: no limit).\n"
    )
    native.mpigrad_joining(seconds + _TURN * min(int(rank), 15), text.encode())
    try:
        yield
    finally:
        native.mpigrad_joined()
