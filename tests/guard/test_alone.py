"""Waits of a program of one rank end by errors, and the program goes on."""

from __future__ import annotations

import sys

import pytest

from launching import PROGRAMS, run

pytestmark = pytest.mark.launcher


@pytest.mark.waits
@pytest.mark.cases("system", reason="the MPI of one rank has its own messages")
@pytest.mark.parametrize("mpi", ["system", "none"])
def test_waits_are_stopped_and_leave_nothing_behind(mpi: str) -> None:
    missing = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"} if mpi == "none" else {}
    program = [sys.executable, str(PROGRAMS / "alone.py")]
    done = run(program, MPIGRAD_TIMEOUT="2", MPIGRAD_GUARD="0", **missing)
    # A large send to oneself is buffered by the MPI of one rank.
    wait = "ended" if mpi == "none" else "limit"
    expected = ["limit"] * 4 + ["5.0", f"{wait} 7.0 ended", "limit", "8.0", "interrupted", "9.0"]
    assert done.stdout.splitlines() == expected, done.stderr
    assert done.returncode == 0


@pytest.mark.waits
def test_a_deadlock_is_proved_again() -> None:
    """A stopped receive is taken back, so that the counts of the board stay right."""
    code = """
import jax.numpy as jnp, mpigrad as mg
for source in (0, 0):
    try:
        mg.recv(jnp.zeros(3), source=source)
    except Exception as error:
        print("deadlock" in str(error))
"""
    done = run([sys.executable, "-c", code], MPIGRAD_TIMEOUT="40", MPIGRAD_GUARD="0")
    assert done.stdout.split() == ["True", "True"], done.stdout + done.stderr
