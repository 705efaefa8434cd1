"""Unreceived messages are reported at the end, except after an error that was caught."""

import pytest

from launching import PROGRAMS, mpigrad
from mpigrad.sparse import hypre_available

pytestmark = pytest.mark.launcher


@pytest.mark.full("several solves that fail to converge, which take long")
def test_failed_solves_that_are_caught_leave_no_reports() -> None:
    done = mpigrad("launch", "-n", 2, PROGRAMS / "failed_solves.py", MPIGRAD_GUARD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("did not converge") == 1 + hypre_available()
    assert done.stdout.endswith("ends\n")
    assert "sent but never received" not in done.stderr
