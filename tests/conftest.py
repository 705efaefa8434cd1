"""One test body for any number of ranks: a whole session runs under mpiexec."""

from __future__ import annotations

import gc
import os
import zlib
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
from mpigrad.communicator import Communicator, default

# Shapes and dtypes that annotations of the problems promise are checked in every call.
install_import_hook("mpigrad.problems", "beartype.beartype")

jax.config.update("jax_enable_x64", True)
assert mpigrad.__version__

ALL = os.environ.get("MPIGRAD_ALL_TESTS") == "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(*counts): runs at these numbers of ranks only, in make test on one of them where "
        "it is of no operation",
    )
    config.addinivalue_line("markers", "thin(*counts): at these in make test, at all in test-full")
    config.addinivalue_line("markers", "heavy: takes long to compile; few cases are enough")
    config.addinivalue_line("markers", "full: runs in make test-full only")
    config.addinivalue_line("markers", "torch: needs PyTorch; runs in make test-torch only")
    config.addinivalue_line("markers", "launcher: starts MPI itself; runs in a serial session")
    config.addinivalue_line("markers", "waits: for time limits mostly; in a serial session beside")


# Where a test runs that names no numbers of ranks, and where a case of a parametrised one, unless
# MPIGRAD_ALL_TESTS=1 (make test-full).
_SINGLE = ((1,), (2,), (2,), (1,), (1,), (2,), (1,), (2,))
_SOME = ((1,), (), (2,), (1,), (), (3,), (), ())
_SOME_OPERATIONS = ((2,), *3 * ((),), (3,), *4 * ((),), (2,), *8 * ((),))
_PAIRS = (*11 * ((2,),), (3,))  # an operation under a transformation: all of them
_HEAVY = ((2,), (), (3,), (), (), ())
# Where tests are of messages: one rank alone proves nothing.
_OF_MESSAGES = ("tests/operations/", "test_transformations", "test_communicator", "test_jacobian")
_SINGLE_OF_MESSAGES = ((2,), (2,), (2,), (3,))
_JIT = ((1, 2), (2, 3), (2, 4))  # each operation's dot test


def _of_messages(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    return "comm" in fixtures and any(f in item.nodeid for f in _OF_MESSAGES)


def counts_of(item: pytest.Item) -> tuple[int, ...]:
    """The numbers of ranks that a test runs on; none where only make test-full runs it."""
    if item.get_closest_marker("full") and not ALL:
        return ()
    marker = item.get_closest_marker("ranks")
    if marker is None and not ALL:
        marker = item.get_closest_marker("thin")
    heavy = item.get_closest_marker("heavy") is not None
    if ALL:
        return marker.args if marker else (1, 2, 3, 4)
    case = getattr(item, "callspec", None)
    if marker and not heavy:
        if marker.name == "thin" or item.get_closest_marker("torch") or _of_messages(item):
            return marker.args
        return (marker.args[zlib.crc32(item.nodeid.encode()) % len(marker.args)],)
    if case and "name" in case.params and "how" in case.params:
        some = _JIT if case.params["how"] == "jit" and not heavy else _PAIRS
    else:
        of_messages = _of_messages(item)
        some = _SOME_OPERATIONS if of_messages else _SOME
        single = _SINGLE_OF_MESSAGES if of_messages else _SINGLE
        some = _HEAVY if heavy else some if case else single
    return some[zlib.crc32(item.nodeid.encode()) % len(some)]


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
    return default()
