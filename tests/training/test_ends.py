"""A program in which one rank fails ends on all ranks with the cause."""

from __future__ import annotations

import time

import pytest

from launching import PROGRAMS, mpigrad, no_orphans


@pytest.mark.launcher
@pytest.mark.waits
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "LookupError: no file of that name"),
        pytest.param(
            "leave",
            "rank 1: has ended; last operation: Allgather at",
            marks=pytest.mark.full("guard/test_broken.py has ranks that leave"),
        ),
    ],
)
def test_a_rank_that_leaves_ends_all_ranks_with_its_cause(how: str, cause: str) -> None:
    start = time.monotonic()
    with no_orphans() as mark:
        done = mpigrad("launch", "-n", 2, PROGRAMS / "trained_together.py", how, **mark)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert cause in said and "trained_together.py" in said, said
    assert time.monotonic() - start < 60  # on a busy machine, most of it for starting
