"""hypre's library: is it there, was it built for this MPI, and what has it done so far?"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigrad.operations.native_targets import register_target
from mpigrad.runtime.native import at_exit, native_library, record
from mpigrad.runtime.native import library as communication
from mpigrad.runtime.native_path import native_path

__all__ = [
    "check_size",
    "hypre_available",
    "hypre_version",
    "library",
    "solver_seconds",
    "why_no_hypre",
]

_LIBRARY = "mpigrad_hypre"
_MARKER = b"mpigrad-hypre-built-with:"


def _built_with(path: pathlib.Path) -> str:
    """The MPI that a hypre module was built with, read without loading it."""
    _, found, rest = path.read_bytes().partition(_MARKER)
    return rest.split(b"\0", 1)[0].decode(errors="replace") if found else "an unknown MPI"


def _mpi_mismatch(built_with: str, vendor: str, version: tuple[int, ...]) -> str:
    """Why a module built with one MPI cannot run on another; empty if it can.

    Releases of Open MPI with one major version share a binary interface.
    """
    runs = f"{vendor} {'.'.join(map(str, version))}"
    name, _, number = built_with.rpartition(" ")
    if name == vendor and number.split(".")[0] == str(version[0]):
        return ""
    return (
        f"this installation's hypre module was built with {built_with}, but mpi4py runs on {runs}. "
        f"Run under {built_with}, or build mpigrad with a hypre made for {runs}."
    )


@functools.cache
def _load() -> tuple[Any, str]:
    """The library or None, and why there is none."""
    if os.environ.get("MPIGRAD_HYPRE", "1") == "0":
        return None, "it is switched off by MPIGRAD_HYPRE=0 in the environment."
    path = native_path(_LIBRARY)
    if path is None:
        return None, (
            "this installation was built without it. Install hypre and the MPI it was built with "
            "(Debian, Ubuntu: apt-get install libhypre-dev libopenmpi-dev), then build mpigrad "
            "again."
        )
    # Loading a module built for another MPI can crash the process, so ask before.
    mismatch = _mpi_mismatch(_built_with(path), *MPI.get_vendor())
    if mismatch:
        return None, mismatch
    try:
        lib = native_library(_LIBRARY)
    except OSError as error:
        return None, (
            f"its library cannot be loaded ({error}). If two MPI libraries are installed, "
            "uninstall the one that hypre was not built with; `mpigrad doctor` names them."
        )
    assert lib is not None
    lib.mpigrad_hypre_mpi_library.restype = ctypes.c_char_p
    theirs = lib.mpigrad_hypre_mpi_library().decode().strip("\0 \n")
    ours = MPI.Get_library_version().strip("\0 \n")
    if theirs != ours:
        return None, f"hypre runs on another MPI library ({theirs}) than mpi4py ({ours})."
    lib.mpigrad_hypre_destroy.argtypes = [ctypes.c_int64]
    lib.mpigrad_hypre_totals.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    lib.mpigrad_hypre_version.restype = ctypes.c_char_p
    lib.mpigrad_hypre_watch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    tell = ctypes.cast(communication().mpigrad_mark_failure, ctypes.c_void_p)
    lib.mpigrad_hypre_watch(ctypes.addressof(record()), tell)
    register_target("mpigrad_hypre_solve", lib)
    at_exit(lib.mpigrad_hypre_finalize)  # runs before mpi4py ends MPI
    return lib, ""


def library() -> Any:
    lib, reason = _load()
    if lib is None:
        raise RuntimeError(f"mpigrad.sparse: no hypre: {reason}")
    return lib


def hypre_available() -> bool:
    """Whether solves can use hypre in this process."""
    return _load()[0] is not None


def why_no_hypre() -> str:
    """Why hypre is not available and how to get it; empty where it is."""
    return _load()[1]


def hypre_version() -> str:
    """Name and release, as in "hypre 2.26.0"; empty where there is none."""
    return library().mpigrad_hypre_version().decode() if hypre_available() else ""


def solver_seconds() -> dict[str, float]:
    """What this rank has spent in hypre so far.

    Returns
    -------
    Seconds `setup` and `solve`, the numbers `setups` and `solves`, and `systems`, the number of
    matrices (pairs of pattern and preconditioner) that hypre keeps now.
    """
    seconds, counts = np.zeros(2), np.zeros(3, np.int64)
    if hypre_available():
        library().mpigrad_hypre_totals(seconds.ctypes.data, counts.ctypes.data)
    return {
        "setup": float(seconds[0]),
        "solve": float(seconds[1]),
        "setups": int(counts[0]),
        "solves": int(counts[1]),
        "systems": int(counts[2]),
    }


def check_size(n_rows: int, nnz: int, bits: int) -> None:
    """Refuse what hypre's integers cannot count: global rows, and entries of one rank."""
    if bits < 64 and n_rows >= 2**31:
        raise ValueError(
            f"mpigrad.sparse: {n_rows} rows are more than this hypre can number: its global "
            "indices have 32 bits (fewer than 2**31 rows). Build hypre with --enable-mixedint, "
            "and mpigrad against it."
        )
    if nnz >= 2**31:
        raise ValueError(
            f"mpigrad.sparse: {nnz} entries on one rank are more than hypre can count "
            "(2**31 - 1); use more ranks"
        )
