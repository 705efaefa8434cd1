"""Arrays with more elements than MPI counts: with a limit of five elements."""

from __future__ import annotations

import os
import pathlib

import pytest

from launching import PROGRAMS, mpigrad

pytestmark = pytest.mark.launcher
TESTS = pathlib.Path(__file__).parents[1]


def run(*, limit: str) -> str:
    """Run all rows of the tables on two ranks, and return the output."""
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    settings = {"MPIGRAD_LARGEST_COUNT": limit, "MPIGRAD_SHARED_MEMORY": "0", "PYTHONPATH": paths}
    done = mpigrad("launch", "-n", 2, PROGRAMS / "counted.py", **settings)
    return done.stdout + done.stderr


@pytest.mark.long("compiles all operations; test_operations.py has the same rows one by one")
def test_every_row() -> None:
    """Messages, pieces, messages in place of a collective, and both long and short blocks."""
    assert run(limit="5").count("33 rows on rank") == 2


def test_a_limit_that_is_not_a_count() -> None:
    assert "MPIGRAD_LARGEST_COUNT must be an integer from 1 to 2147483647, got '0'" in run(
        limit="0"
    )
