"""Check that all ranks do the same run."""

from __future__ import annotations

import hashlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.operations import allreduce, require

__all__ = ["fingerprint", "require_same_run"]


def fingerprint(values: Any) -> int:
    """Return a hash of 48 bits of the printed form of `values`."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=6).digest(), "big")


def require_same_run(run: int, dtype: np.dtype, comm: Communicator) -> None:
    """Raise a RuntimeError on all ranks at run time if their runs or dtypes differ (collective).

    Native runs make the same check, with the same text, in native/waves/propagate.h.

    Parameters
    ----------
    run
        The fingerprint of this rank's run.
    dtype
        The dtype of the fields on this rank, float32 or float64.
    """
    low, high = run % 2**24, run // 2**24 * 2 + (dtype == jnp.float64)
    most = allreduce(jnp.array([low, high, -low, -high], jnp.int32), MPI.MAX, comm)
    require(
        jnp.all(most[:2] == -most[2:]),
        "the run is not the same on all ranks: give the same dtype, time step, number of steps, "
        "survey and settings on every rank.",
        comm=comm,
    )
