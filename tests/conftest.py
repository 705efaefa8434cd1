"""One test body for any number of ranks: a whole session runs under mpiexec."""

from __future__ import annotations

import gc
import os
import pathlib
from collections.abc import Iterator

from xla_flags import QUICK_TO_COMPILE

# Several ranks share two cores here: one compute thread each, also in a serial session. (XLA stops
# reading at the last flag, which has no dashes.)
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if os.environ.get("MPIGRAD_OPTIMIZE") != "1":
    # Programs are tiny and compiled once: these halve the time of compiling. With
    # MPIGRAD_OPTIMIZE=1 they are compiled as users' are.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    os.environ["XLA_FLAGS"] = QUICK_TO_COMPILE + os.environ["XLA_FLAGS"]
os.environ.setdefault("MPIGRAD_GUARD", "1")  # a wrong test fails on every rank, and goes on

import jax
import pytest
from jaxtyping import install_import_hook
from mpi4py import MPI

import mpigrad
from mpigrad.communicator import Communicator, default_communicator

# Shapes and dtypes that annotations of waves and applications promise are checked in every call.
install_import_hook(["mpigrad.waves", "mpigrad_apps"], "beartype.beartype")

jax.config.update("jax_enable_x64", True)
assert mpigrad.__version__

ALL = os.environ.get("MPIGRAD_ALL_TESTS") == "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*counts): runs at these numbers of ranks, everywhere")
    config.addinivalue_line(
        "markers", "thin(*counts): make test runs it at these numbers, make test-full at 1, 2, 3, 4"
    )
    config.addinivalue_line(
        "markers", "full(reason): make test leaves it out for this reason, make test-full runs it"
    )
    config.addinivalue_line("markers", "torch: needs PyTorch; runs in make test-torch only")
    config.addinivalue_line("markers", "launcher: starts MPI itself; runs in a serial session")
    config.addinivalue_line("markers", "waits: for time limits mostly; in a serial session beside")


# The rule. A test runs on 2 ranks: what takes a communicator proves nothing on one. Its mark names
# other numbers where these are the point: 1 for what one rank does by itself, 3 where sizes can be
# uneven or a rank has two neighbours, 4 where ranks form a plane. `make test-full` runs every test
# that does not name its numbers by `ranks` on 1, 2, 3 and 4.
DEFAULT = (2,)
EVERY = (1, 2, 3, 4)


def counts_of(item: pytest.Item) -> tuple[int, ...]:
    """The numbers of ranks that a test runs on; none if only make test-full runs it."""
    if item.get_closest_marker("full") and not ALL:
        return ()
    if marker := item.get_closest_marker("ranks"):
        return marker.args
    if ALL:
        return EVERY
    marker = item.get_closest_marker("thin")
    return marker.args if marker else DEFAULT


def runs(item: pytest.Item, size: int) -> bool:
    """Whether a test runs in this session."""
    if item.get_closest_marker("torch") and os.environ.get("MPIGRAD_TORCH") != "1":
        return False
    if item.get_closest_marker("launcher"):
        return not item.get_closest_marker("full") or ALL
    return size in counts_of(item)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Not skipped: ranks meet after each test, which takes as long as a small one.
    size = MPI.COMM_WORLD.size
    others = [item for item in items if not runs(item, size)]
    items[:] = [item for item in items if runs(item, size)]
    config.hook.pytest_deselected(items=others)
    # Modules stay: the collector need not go through them again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # nor often: a twentieth of the time


@pytest.fixture(scope="module", autouse=True)
def compiled_programs() -> Iterator[None]:
    """Of all cases they would fill the memory: gigabytes a rank."""
    yield
    if ALL:
        jax.clear_caches()


@pytest.fixture
def comm() -> Communicator:
    return default_communicator()


@pytest.fixture
def directory(tmp_path, comm) -> pathlib.Path:
    """An empty directory, the same on every rank."""
    return comm.mpi.bcast(tmp_path)


@pytest.fixture(scope="session")
def alone() -> Communicator:
    """One rank by itself: what it computes is what the one-rank program computes."""
    return Communicator(MPI.COMM_SELF)
