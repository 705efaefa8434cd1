"""Fixtures of the optimizers' tests."""

import pytest
from layouts import layouts
from mpi4py import MPI

import mpigrad
from mpigrad.communicator import Communicator


@pytest.fixture(scope="session")
def chains():
    """The objectives of `layouts`, compiled once for all tests."""
    return layouts(mpigrad.default_communicator(), Communicator(MPI.COMM_SELF))
