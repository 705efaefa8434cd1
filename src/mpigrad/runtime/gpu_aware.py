"""MPIGRAD_GPU_AWARE: which arrays are passed to MPI as device addresses."""

from __future__ import annotations

import ctypes
import os

__all__ = ["check_gpu_aware", "gpu_aware"]

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

    from mpigrad.runtime.mpi_library import find_mpi_libraries

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
