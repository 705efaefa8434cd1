"""Set up a test session, which runs the same tests on every rank under mpiexec."""

from __future__ import annotations

import gc
import os
import pathlib
from collections.abc import Iterator

from xla_flags import QUICK_TO_COMPILE

# Several ranks share two cores here, so each has one compute thread, also in a serial session. XLA
# stops reading at the last flag, because it does not begin with dashes.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if os.environ.get("MPIGRAD_OPTIMIZE") != "1":
    # Programs are tiny and compiled once, and these flags halve the time of compiling. With
    # MPIGRAD_OPTIMIZE=1 programs are compiled as users do.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    os.environ["XLA_FLAGS"] = QUICK_TO_COMPILE + os.environ["XLA_FLAGS"]
# With the guard a wrong test fails on every rank, and the session goes on.
os.environ.setdefault("MPIGRAD_GUARD", "1")

import jax
import pytest
from jaxtyping import install_import_hook
from mpi4py import MPI

import mpigrad
import tiers
from mpigrad.communicator import Communicator, default_communicator

# The shapes and dtypes in the annotations of waves and applications are checked in every call.
install_import_hook(["mpigrad.waves", "mpigrad_apps"], "beartype.beartype")

jax.config.update("jax_enable_x64", True)
assert mpigrad.__version__


def pytest_configure(config: pytest.Config) -> None:
    for line in tiers.MARKERS:
        config.addinivalue_line("markers", line)


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    ranks = os.environ.get("MPIGRAD_TEST_RANKS")  # tests/run.py sets it
    if ranks is None or not collection_path.name.startswith("test_"):
        return None
    return None if tiers.may_run(collection_path, int(ranks)) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.check_marks(config, items)
    # The others are deselected and not skipped: ranks meet after each test, which takes as long as
    # a small test.
    size = MPI.COMM_WORLD.size
    others = [item for item in items if not tiers.runs(item, size)]
    items[:] = [item for item in items if tiers.runs(item, size)]
    config.hook.pytest_deselected(items=others)
    # Modules stay, so the collector need not visit them again and again, and it need not run often:
    # that was a twentieth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def compiled_programs() -> Iterator[None]:
    """Drop compiled programs after each module, as those of all cases fill gigabytes per rank."""
    yield
    if tiers.ALL:
        jax.clear_caches()


@pytest.fixture
def comm() -> Communicator:
    """Return the communicator of all ranks."""
    return default_communicator()


@pytest.fixture
def directory(tmp_path, comm) -> pathlib.Path:
    """Return an empty directory, the same on every rank."""
    return comm.mpi.bcast(tmp_path)


@pytest.fixture(scope="session")
def alone() -> Communicator:
    """Return a communicator of this rank only, which computes as the one-rank program does."""
    return Communicator(MPI.COMM_SELF)
