"""MPIGRAD_GPU_AWARE: which arrays are passed to MPI as device addresses."""

from __future__ import annotations

import ctypes
import os

__all__ = ["check_gpu_aware", "gpu_aware"]

_VARIABLE = "MPIGRAD_GPU_AWARE"
# UCX's transports between devices, one of which it loads if it finds the driver.
_TRANSPORTS = ("/libuct_cuda", "/libuct_rocm")
_CUDA, _HIP = 0, 2  # MPICH's numbers of kinds of GPUs


def gpu_aware() -> str:
    """Return MPIGRAD_GPU_AWARE: "" (no device addresses), "p2p" or "all"."""
    text = os.environ.get(_VARIABLE, "")
    if text not in ("", "0", "p2p", "all"):
        raise ImportError(
            f"mpigrad: {_VARIABLE} must be p2p (messages between two ranks), all (collectives too) "
            f"or 0 (through the host), got {text!r}. Set it to one of them."
        )
    return "" if text == "0" else text


def check_gpu_aware() -> None:
    """Raise an ImportError if this MPI would crash with the device addresses that it would get."""
    wanted = gpu_aware()
    if not wanted or os.environ.get("MPIGRAD_STAGE"):  # a test on CPUs
        return
    from mpi4py import MPI

    from mpigrad.runtime.mpi_library import find_mpi_libraries

    version = MPI.Get_library_version()
    if _is_gpu_aware(find_mpi_libraries(version)[0]) is not False:
        return
    name = version.splitlines()[0]
    if wanted == "all":
        raise ImportError(
            f"mpigrad: {_VARIABLE}=all, but this MPI ({name}) was built without GPU support, and "
            "would add device addresses up on the CPU. Use a GPU-aware MPI, or "
            f"{_VARIABLE}=p2p with UCX."
        )
    with open("/proc/self/maps") as maps:
        loaded = maps.read()
    if not any(transport in loaded for transport in _TRANSPORTS):
        raise ImportError(
            f"mpigrad: {_VARIABLE}=p2p, but this MPI ({name}) was built without GPU support, and "
            "has not loaded UCX's libuct_cuda or libuct_rocm either. Use a GPU-aware MPI or a UCX "
            f"with GPU support, or unset {_VARIABLE}."
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
