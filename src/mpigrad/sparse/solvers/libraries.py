"""The libraries that solve: hypre, our multigrid, PETSc and SLEPc. Availability, statistics."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import pathlib
import re
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigrad.extend import at_exit, native_library
from mpigrad.runtime import (
    ANY_MPI,
    find_mpi_libraries,
    hypre_built_with,
    mpi_library_path,
    native_path,
    record,
    status_layout,
    variant_library,
)
from mpigrad.runtime import library as communication

__all__ = [
    "check_size",
    "hypre_available",
    "hypre_version",
    "library",
    "multigrid_library",
    "petsc_function",
    "petsc_module",
    "slepc_module",
    "solver_seconds",
    "totals",
    "why_no_hypre",
    "why_no_petsc",
    "why_no_slepc",
]

# ---- The native library of mpigrad's own multigrid, and its statistics ----


@functools.cache
def multigrid_library() -> Any:
    """Return the library of multigrid for this processor."""
    lib = native_library(variant_library("multigrid"))
    assert lib is not None
    lib.mpigrad_multigrid_create.restype = ctypes.c_int64
    lib.mpigrad_multigrid_totals.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return lib


def totals() -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of set-up and solving, and the counts of set-ups, solves and systems."""
    spent, counts = np.zeros(2), np.zeros(3, np.int64)
    if multigrid_library.cache_info().currsize:
        multigrid_library().mpigrad_multigrid_totals(spent.ctypes.data, counts.ctypes.data)
    return spent, counts


# ---- hypre's library: its availability, the MPI that it was built for, and its statistics ----


_LIBRARY = "mpigrad_hypre"


def _mpi_mismatch(built_with: str, vendor: str, version: tuple[int, ...]) -> str:
    """Return why a module built with one MPI cannot run on another, or an empty string.

    Releases of Open MPI with one major version share a binary interface.
    """
    runs = f"{vendor} {'.'.join(map(str, version))}"
    name, _, number = built_with.rpartition(" ")
    if built_with == ANY_MPI:
        return ""
    if name == vendor and number.split(".")[0] == str(version[0]):
        return ""
    return (
        f"this installation's hypre module was built with {built_with}, but mpi4py runs on {runs}. "
        f"Run under {built_with}, or build mpigrad with a hypre made for {runs}."
    )


def _find_mpi(lib: Any) -> str:
    """Connect a module for any MPI to the MPI of this process. Return what is wrong, or ""."""
    lib.mpigrad_hypre_constant_names.restype = ctypes.c_char_p
    lib.mpigrad_hypre_find_mpi.restype = ctypes.c_char_p
    names = lib.mpigrad_hypre_constant_names().decode().split()
    pointers = MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_void_p)
    mask = 2**64 - 1 if pointers else 2**32 - 1
    # Handles are unsigned numbers. Other constants are addresses or C integers.
    values = [
        value.handle & mask if hasattr(value, "handle") else int(value)
        for value in (getattr(MPI, name) for name in names)
    ]
    constants = (ctypes.c_int64 * len(values))(*values)
    status = (ctypes.c_int64 * 3)(MPI._sizeof(MPI.Status), *status_layout())
    error = lib.mpigrad_hypre_find_mpi(mpi_library_path().encode(), pointers, status, constants)
    return "" if error is None else f"it cannot use this process's MPI library: {error.decode()}."


@functools.cache
def _load() -> tuple[Any, str]:
    """Return the library or None, and the reason if it is None."""
    if os.environ.get("MPIGRAD_HYPRE", "1") == "0":
        return None, "it is switched off by MPIGRAD_HYPRE=0 in the environment."
    path = native_path(_LIBRARY)
    if path is None:
        return None, (
            "this installation was built without it. Install the wheel of mpigrad, which contains "
            "hypre, or build mpigrad with HYPRE_SOURCE=<folder of hypre's sources>."
        )
    # Loading a module built for another MPI can crash the process, so ask before.
    built_with = hypre_built_with(path)
    mismatch = _mpi_mismatch(built_with, *MPI.get_vendor())
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
    wrong = _find_mpi(lib) if built_with == ANY_MPI else ""
    if wrong:
        return None, wrong
    lib.mpigrad_hypre_mpi_library.restype = ctypes.c_char_p
    theirs = lib.mpigrad_hypre_mpi_library().decode().strip("\0 \n")
    ours = MPI.Get_library_version().strip("\0 \n")
    if theirs != ours:
        return None, f"hypre runs on another MPI library ({theirs}) than mpi4py ({ours})."
    lib.mpigrad_hypre_destroy.argtypes = [ctypes.c_int64]
    lib.mpigrad_hypre_totals.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    lib.mpigrad_hypre_version.restype = ctypes.c_char_p
    guard, names = communication(), ("mpigrad_begin", "mpigrad_end", "mpigrad_mark_failure")
    lib.mpigrad_hypre_watch.argtypes = [ctypes.c_void_p] * (1 + len(names))
    calls = (ctypes.cast(getattr(guard, name), ctypes.c_void_p) for name in names)
    lib.mpigrad_hypre_watch(ctypes.addressof(record()), *calls)
    at_exit(lib.mpigrad_hypre_finalize)  # runs before mpi4py ends MPI
    return lib, ""


def library() -> Any:
    """Return hypre's library, or raise an error that says why it is not available."""
    lib, reason = _load()
    if lib is None:
        raise RuntimeError(f"mpigrad.sparse: hypre is not available: {reason}")
    return lib


def hypre_available() -> bool:
    """Return True if solves can use hypre in this process.

    Examples
    --------
    >>> from mpigrad.sparse import hypre_available, hypre_version
    >>> hypre_available() == bool(hypre_version())
    True
    """
    return _load()[0] is not None


def why_no_hypre() -> str:
    """Return why hypre is not available and how to get it, or an empty string if it is.

    Examples
    --------
    >>> from mpigrad.sparse import hypre_available, why_no_hypre
    >>> hypre_available() == (why_no_hypre() == "")
    True
    """
    return _load()[1]


def hypre_version() -> str:
    """Return the name and release, as in "hypre 2.26.0", or an empty string without hypre.

    Examples
    --------
    >>> from mpigrad.sparse import hypre_version
    >>> hypre_version() == "" or hypre_version().startswith("hypre ")
    True
    """
    return library().mpigrad_hypre_version().decode() if hypre_available() else ""


def solver_seconds() -> dict[str, float]:
    """Return the time that this rank has spent in multigrid so far, in hypre and in BoxMG.

    Returns
    -------
    The seconds `setup` and `solve`, the counts `setups` and `solves`, and `systems`, the number of
    matrices (pairs of pattern and preconditioner) that are kept now.

    Examples
    --------
    >>> from mpigrad.sparse import solver_seconds
    >>> sorted(solver_seconds())
    ['setup', 'setups', 'solve', 'solves', 'systems']
    """
    seconds, counts = np.zeros(2), np.zeros(3, np.int64)
    if hypre_available():
        library().mpigrad_hypre_totals(seconds.ctypes.data, counts.ctypes.data)
    own_seconds, own_counts = totals()
    seconds, counts = seconds + own_seconds, counts + own_counts
    return {
        "setup": float(seconds[0]),
        "solve": float(seconds[1]),
        "setups": int(counts[0]),
        "solves": int(counts[1]),
        "systems": int(counts[2]),
    }


def check_size(n_rows: int, nnz: int, bits: int) -> None:
    """Raise an error if hypre's integers cannot count the global rows or one rank's entries."""
    if bits < 64 and n_rows >= 2**31:
        raise ValueError(
            f"solve: {n_rows} rows are more than this hypre can number: its global "
            "indices have 32 bits (fewer than 2**31 rows). Build hypre with --enable-mixedint, "
            "and mpigrad against it."
        )
    if nnz >= 2**31:
        raise ValueError(
            f"solve: {nnz} entries on one rank are more than hypre can count (2**31 - 1). Use more "
            "ranks."
        )


# ---- petsc4py: its availability, and the MPI that it was built with ----


@functools.cache
def _load_petsc() -> tuple[Any, str]:
    """Return the module `petsc4py.PETSc` or None, and the reason if it is None."""
    try:
        petsc4py: Any = importlib.import_module("petsc4py")
    except ImportError:
        return None, (
            "petsc4py is not installed. Install the release of this site's PETSc with PETSC_DIR "
            "set, or load the module of the site that has it."
        )
    starts = "petsc4py.PETSc" not in sys.modules
    if starts:
        reason = _why_not_loaded(pathlib.Path(petsc4py.__file__).parent)
        if reason:
            return None, reason
        # On ranks of their own: a communicator of some ranks may solve, and the others not.
        petsc4py.init(["mpigrad", "-no_signal_handler"], comm=MPI.COMM_SELF)
    try:
        petsc: Any = importlib.import_module("petsc4py.PETSc")
    except Exception as error:
        return None, f"petsc4py cannot be imported ({error}). Reinstall it for this site's PETSc."
    if starts:
        petsc.Sys.setDefaultComm(MPI.COMM_WORLD)  # for other users of petsc4py in this process
    return petsc, ""


def _why_not_loaded(package: pathlib.Path) -> str:
    """Return why petsc4py must not be imported: its MPI is another one than mpi4py's."""
    ours, before = find_mpi_libraries(MPI.Get_library_version())
    # Loading the module does not start MPI, importing it does.
    for path in sorted(package.glob("lib/**/PETSc.*.so"))[:1]:
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            return f"petsc4py cannot be loaded ({error}). Reinstall it for this site's PETSc."
    others = [p for p in find_mpi_libraries(MPI.Get_library_version())[1] if p not in before]
    if others:
        return (
            f"petsc4py was built with the MPI {others[0]}, but mpi4py runs on {ours}. Run under "
            "that MPI, or build PETSc and petsc4py with this one."
        )
    return ""


def petsc_module() -> Any:
    """Return the module `petsc4py.PETSc`, or raise an error that says why it is not available."""
    module, reason = _load_petsc()
    if module is None:
        raise RuntimeError(f"PETSc: {reason} Or solve with GMRES() or PCG().")
    return module


def petsc_function(name: str) -> Any:
    """Return a function of PETSc that some releases of petsc4py lack."""
    return getattr(ctypes.CDLL(petsc_module().__file__), name)


def why_no_petsc() -> str:
    """Return why `PETSc` cannot solve in this process, or an empty string if it can.

    Examples
    --------
    >>> from mpigrad.sparse import why_no_petsc
    >>> why_no_petsc() == "" or "petsc4py" in why_no_petsc()
    True
    """
    return _load_petsc()[1]


# ---- slepc4py: its availability, and the PETSc that it was built with ----


@functools.cache
def _load_slepc() -> tuple[Any, str]:
    """Return the module `slepc4py.SLEPc` or None, and the reason if it is None."""
    petsc, reason = _load_petsc()
    if petsc is None:
        return None, reason
    try:
        slepc4py: Any = importlib.import_module("slepc4py")
    except ImportError:
        return None, (
            "slepc4py is not installed. Install the release of this site's SLEPc with SLEPC_DIR "
            "and PETSC_DIR set, or load the module of the site that has it."
        )
    try:
        for path in sorted(pathlib.Path(slepc4py.__file__).parent.glob("lib/**/SLEPc.*.so"))[:1]:
            before = _petsc_libraries()
            ctypes.CDLL(str(path))  # does not start SLEPc yet
            others = sorted(_petsc_libraries() - before)
            if others:
                return None, (
                    f"slepc4py was built with the PETSc {others[0]}, but petsc4py runs on "
                    f"{' '.join(before) or 'another'}. Build both with one PETSc."
                )
        return importlib.import_module("slepc4py.SLEPc"), ""
    except Exception as error:
        return None, f"slepc4py cannot be imported ({error}). Reinstall it for this site's SLEPc."


def _petsc_libraries() -> set[str]:
    """Return the paths of all PETSc libraries in this process."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    return set(re.findall(r"/\S*/libpetsc[^/\s]*\.so\S*", maps))


def slepc_module() -> Any:
    """Return the module `slepc4py.SLEPc`, or raise an error that says why it is not available."""
    module, reason = _load_slepc()
    if module is None:
        raise RuntimeError(f"SLEPc: {reason} Or leave out solver= of eigh, for LOBPCG.")
    return module


def why_no_slepc() -> str:
    """Return why `SLEPc` cannot compute in this process, or an empty string if it can.

    Examples
    --------
    >>> from mpigrad.sparse import why_no_slepc
    >>> why_no_slepc() == "" or "4py" in why_no_slepc()
    True
    """
    return _load_slepc()[1]
