"""Errors of MPI in the middle of an operation leave no message under way."""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad as mg
from mpigrad.communicator import Communicator
from mpigrad.runtime.native import library

HEADER = pathlib.Path(__file__).parents[2] / "native/mpi/mpi_runtime.h"
HANDLE = ctypes.c_void_p if MPI._sizeof(MPI.Comm) == 8 else ctypes.c_int
POST = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, HANDLE, ctypes.c_int, ctypes.c_int, HANDLE,
    ctypes.c_void_p,
)  # fmt: skip


@contextlib.contextmanager
def failing(name: str) -> Iterator[None]:
    """Let a function that posts messages fail."""
    listed = HEADER.read_text().partition("MPIGRAD_MPI_FUNCTIONS(X)")[2].partition("struct")[0]
    names = re.findall(r"X\((\w+)\)", listed)
    table = (ctypes.c_void_p * len(names)).in_dll(library(), "_ZN7mpigrad7runtimeE")
    fail = POST(lambda *_: MPI.ERR_OTHER)
    index = names.index(name)
    before, table[index] = table[index], ctypes.cast(fail, ctypes.c_void_p).value
    try:
        yield
    finally:
        table[index] = before


@pytest.mark.ranks(2, 3)
def test_a_receive_is_withdrawn_after_a_failed_send(comm: Communicator) -> None:
    """Otherwise it would take the next message, into memory that was freed."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    neighbors = sorted({right, left})
    counts = [1] * len(neighbors)

    def exchange(number: float) -> np.ndarray:
        rows = jnp.full((len(neighbors), 4), number + comm.rank)
        return np.asarray(mg.neighbor_alltoallv(rows, neighbors, counts, counts, comm=comm))

    with failing("Isend"), pytest.raises(jax.errors.JaxRuntimeError, match="neighbor_alltoallv at"):
        exchange(10.0)
    comm.mpi.barrier()
    np.testing.assert_array_equal(exchange(20.0)[:, 0], 20.0 + np.array(neighbors))
