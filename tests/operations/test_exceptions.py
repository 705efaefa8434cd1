"""Exceptions of C++ inside an operation are errors with rank, operation and line."""

from __future__ import annotations

import pytest

from launching import PROGRAMS, mpigrad

pytestmark = pytest.mark.launcher


def test_too_little_memory_for_a_message() -> None:
    done = mpigrad("launch", "-n", 2, PROGRAMS / "little_memory.py")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        line = f"mpigrad: rank {rank} of 2: isend at tests/programs/little_memory.py:16: this rank"
        assert f"{line} does not have enough memory for the message. Use" in done.stdout
    assert done.stdout.count("sum 2.0") == 2
