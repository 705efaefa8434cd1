"""Tests of mpigrad.torch, each with a separate chain of messages."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("MPIGRAD_TORCH") == "1" else ["*"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if os.path.dirname(__file__) in str(item.path):
            item.add_marker(pytest.mark.torch)


@pytest.fixture(autouse=True)
def own_messages() -> Iterator[None]:
    from mpigrad.torch import messages

    with messages():
        yield
