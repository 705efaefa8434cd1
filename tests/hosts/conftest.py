"""Fixtures for tests on several hosts, which only `make test-hosts` runs."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if "MPIGRAD_TEST_HOSTS" in os.environ else ["*.py"]

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """A directory that all hosts see, as on a cluster's shared file system."""
    directory = ROOT / "build" / "hosts"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


@pytest.fixture(scope="session")
def network(shared: pathlib.Path) -> Iterator[object]:
    """Four hosts, connected by a switch."""
    from network import Network

    with Network(("node1", "node2", "node3", "node4"), shared) as network:
        yield network
