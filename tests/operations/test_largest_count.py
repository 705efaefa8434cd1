"""Arrays with more elements than MPI counts: with a limit of five elements."""

from __future__ import annotations

import os
import pathlib

import pytest

from launching import PROGRAMS, mpigrad

pytestmark = pytest.mark.launcher
TESTS = pathlib.Path(__file__).parents[1]


def run(*names: str, limit: str) -> str:
    """Run these rows of the tables on two ranks, all without names, and return the output."""
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    settings = {"MPIGRAD_LARGEST_COUNT": limit, "MPIGRAD_SHARED_MEMORY": "0", "PYTHONPATH": paths}
    done = mpigrad("launch", "-n", 2, PROGRAMS / "counted.py", *names, **settings)
    return done.stdout + done.stderr


def test_one_row_of_each_kind() -> None:
    """A message, pieces, messages in place of a collective, and both long and short blocks."""
    names = ("send and recv", "allreduce", "allgather", "alltoallv")
    assert run(*names, limit="5").count("4 rows on rank") == 2


@pytest.mark.long("compiles all operations; test_one_row_of_each_kind compiles four")
def test_every_row() -> None:
    assert run(limit="5").count("33 rows on rank") == 2


def test_a_limit_that_is_not_a_count() -> None:
    assert "MPIGRAD_LARGEST_COUNT must be an integer from 1 to 2147483647, got '0'" in run(
        limit="0"
    )
