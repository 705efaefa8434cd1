"""Solves by hypre, whose messages are its own: stopped ranks are found, and long solves go on."""

from __future__ import annotations

import re
import time

import pytest

from launching import PROGRAMS, idling, mpigrad
from mpigrad.sparse.solvers.libraries import hypre_available

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.waits,
    pytest.mark.skipif(not hypre_available(), reason="no hypre"),
]
PROGRAM = PROGRAMS / "stopped_solve.py"


@pytest.mark.long(
    "the other rank waits in MPI; the messages of all other parts are in test_chaos.py"
)
def test_a_stopped_rank_in_a_solve_ends_the_job() -> None:
    start = time.monotonic()
    done = mpigrad("launch", "-n", 2, PROGRAM, "stop", MPIGRAD_TIMEOUT="3")
    assert time.monotonic() - start < 60
    assert done.returncode != 0
    text = done.stderr
    # The stop may fall into the message in front of a solve.
    line = r"rank 1: .* at .*stopped_solve.py:\d+, and its process is stopped \(SIGSTOP\)"
    assert re.search(line, text), text
    assert "Let the stopped process go on (kill -CONT)" in text


@pytest.mark.full("a solve that takes longer than a second takes processor time")
def test_a_solve_may_take_longer_than_an_operation_may_wait() -> None:
    done = mpigrad("launch", "-n", 2, PROGRAM, "long", MPIGRAD_TIMEOUT="1", **idling())
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[1]) > 3.0  # of which a part compiles
