"""The names of mpi4jax, on the operations of mpigrad.

`mpigrad launch --as mpi4jax program.py` and `python -m mpigrad.compat.mpi4jax program.py` run a
program for which `import mpi4jax` gives this module.
"""

from __future__ import annotations

from typing import Any

import jax

from mpigrad.compat.mpi4jax.communicators import communicator, version
from mpigrad.compat.mpi4jax.operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    bcast,
    gather,
    recv,
    reduce,
    scan,
    scatter,
    send,
    sendrecv,
)
from mpigrad.compat.mpi4jax.stand_in import refuse

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bcast",
    "communicator",
    "gather",
    "has_cuda_support",
    "has_sycl_support",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]


def has_cuda_support() -> bool:
    """Return True if arrays of this program are on NVIDIA GPUs, which mpigrad then sends.

    Examples
    --------
    >>> from mpigrad.compat import mpi4jax
    >>> isinstance(mpi4jax.has_cuda_support(), bool)
    True
    """
    return jax.default_backend() == "gpu"


def has_sycl_support() -> bool:
    """Return False: mpigrad does not send arrays on Intel GPUs.

    Examples
    --------
    >>> from mpigrad.compat import mpi4jax
    >>> mpi4jax.has_sycl_support()
    False
    """
    return False


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version()
    refuse(name)
    raise AttributeError(f"module 'mpi4jax' has no attribute {name!r}")
