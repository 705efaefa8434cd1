"""What the problems' tests share."""

import pathlib

import pytest
from mpi4py import MPI

from mpigrad.communicator import Communicator


@pytest.fixture
def directory(tmp_path, comm) -> pathlib.Path:
    """An empty directory, the same on every rank."""
    return comm.mpi.bcast(tmp_path)


@pytest.fixture(scope="session")
def alone() -> Communicator:
    """One rank by itself: what it computes is what the one-rank program computes."""
    return Communicator(MPI.COMM_SELF)
