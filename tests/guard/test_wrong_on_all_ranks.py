"""Errors that every rank gets before a message is sent, so that a session can go on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad.communicator import Communicator

pytestmark = pytest.mark.ranks(2)


def test_grids_of_ranks_that_differ(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="cartesian: dims and periods must be the same") as caught:
        comm.cartesian((2,), periods=comm.rank == 1)
    text = "dims=(2,) and periods=(False,) on rank 0, dims=(2,) and periods=(True,) on rank 1."
    assert text in str(caught.value)


def test_an_operation_in_a_custom_operation(comm: Communicator) -> None:
    def forward(v: np.ndarray, mpi: object) -> np.ndarray:
        return np.asarray(mg.allreduce(v, comm=comm))

    with pytest.raises(jax.errors.JaxRuntimeError, match="transpose to send by mpi4py, got an op"):
        mg.custom_operation(forward, forward)(jnp.ones(3))
