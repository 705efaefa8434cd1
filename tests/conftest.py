"""One test body for any number of ranks: a whole session runs under mpiexec."""

from __future__ import annotations

import os

# Several ranks share two cores here: one compute thread each, also in a serial session. Programs
# are tiny and compiled once: compiling fast matters more than running fast.
os.environ["XLA_FLAGS"] = (
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax
import pytest
from mpi4py import MPI

import mpigrad
from mpigrad.communicator import Communicator, default

jax.config.update("jax_enable_x64", True)
assert mpigrad.__version__


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*counts): runs at these numbers of ranks only")
    config.addinivalue_line("markers", "launcher: starts MPI itself; runs in a serial session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    size = MPI.COMM_WORLD.size
    for item in items:
        marker = item.get_closest_marker("ranks")
        if marker and size not in marker.args:
            item.add_marker(pytest.mark.skip(reason=f"for {marker.args} ranks, not {size}"))


@pytest.fixture
def comm() -> Communicator:
    return default()
