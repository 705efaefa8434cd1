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
from mpigrad.communicator import Communicator, default_communicator

# The shapes and dtypes in the annotations of waves and applications are checked in every call.
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


# The rule. A test runs on 2 ranks, because a collective test proves nothing on one. A mark names
# other numbers if these are the point: 1 for what one rank does by itself, 3 if sizes can be uneven
# or a rank has two neighbours, 4 if ranks form a plane. `make test-full` runs every test without a
# `ranks` mark on 1, 2, 3 and 4 ranks. CONTRIBUTING.md has a table of the marks.
DEFAULT = (2,)
EVERY = (1, 2, 3, 4)


def counts_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the numbers of ranks that a test runs on: none if only make test-full has it."""
    if item.get_closest_marker("full") and not ALL:
        return ()
    if marker := item.get_closest_marker("ranks"):
        return marker.args
    if ALL:
        return EVERY
    marker = item.get_closest_marker("thin")
    return marker.args if marker else DEFAULT


def check_reasons(items: list[pytest.Item]) -> None:
    """Raise an error that names the tests with a `full` mark but without a reason."""
    missing = {
        item.nodeid.partition("[")[0]
        for item in items
        for mark in item.iter_markers("full")
        if not (mark.args and isinstance(mark.args[0], str) and mark.args[0].strip())
    }
    if missing:
        listed = "\n  ".join(sorted(missing))
        raise pytest.UsageError(
            "a test that only make test-full runs needs a reason: "
            f'pytest.mark.full("why"). Add it to\n  {listed}'
        )


def runs(item: pytest.Item, size: int) -> bool:
    """Return True if a test runs in a session of this size."""
    if item.get_closest_marker("torch") and os.environ.get("MPIGRAD_TORCH") != "1":
        return False
    if item.get_closest_marker("launcher"):
        return not item.get_closest_marker("full") or ALL
    return size in counts_of(item)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    check_reasons(items)
    # The others are deselected and not skipped: ranks meet after each test, which takes as long as
    # a small test.
    size = MPI.COMM_WORLD.size
    others = [item for item in items if not runs(item, size)]
    items[:] = [item for item in items if runs(item, size)]
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
    if ALL:
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
