"""Write the sender, the tag and the size of a received message into an MPI.Status."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import io_callback
from mpi4py import MPI

from mpigrad.operations.carrier import tie_in

__all__ = ["set_status"]


def _write(status: MPI.Status, nbytes: int, source: Any, tag: Any) -> np.ndarray:
    status.Set_source(int(source))
    status.Set_tag(int(tag))
    status.Set_error(MPI.SUCCESS)
    status.Set_elements(MPI.BYTE, nbytes)
    return np.zeros((), "float32")


def set_status(status: MPI.Status | None, value: Any, source: Any, tag: Any) -> Any:
    """Set `status` when the message `value` has come, and return `value`.

    Parameters
    ----------
    status
        The status of mpi4py, or None. A compiled program sets it each time it runs.
    value
        The received array.
    source, tag
        Integer scalars, the sender and the tag.
    """
    if status is None:
        return value
    write = functools.partial(_write, status, value.size * value.dtype.itemsize)
    if not isinstance(source, Tracer):
        write(source, tag)
        return value
    done = io_callback(write, jax.ShapeDtypeStruct((), np.float32), source, tag)
    return tie_in(value, done)
