"""Unreceived messages are an error at the end, except after an error that was caught."""

import pathlib

import pytest

from launching import PROGRAMS, mpigrad
from mpigrad.guard.settings import unreceived_is_error
from mpigrad.sparse import hypre_available

pytestmark = pytest.mark.launcher


def leave_a_message(folder: pathlib.Path, ranks: int, **environment: str) -> tuple[int, str]:
    """Run a program whose last rank does not receive the second message of rank 0."""
    program = folder / "left.py"
    program.write_text(
        "import jax.numpy as jnp, mpigrad as mg\n"
        "comm = mg.default_communicator()\n"
        "for _ in range(2 * (comm.rank == 0)):\n"
        "    mg.send(jnp.ones(3), comm.size - 1)\n"
        "if comm.rank == comm.size - 1:\n"
        "    mg.recv(jnp.ones(3), 0)\n"
    )
    done = mpigrad("launch", "-n", ranks, "--profile", program, **environment)
    line = f"rank 0: 1 message to rank {ranks - 1} (tag 0), float32[3] by send at "
    assert done.stderr.count(line) == 1, done.stderr
    assert "operations of" in done.stderr  # the profile is not lost
    return done.returncode, done.stderr.rstrip()


@pytest.mark.cases("2", reason="the messages of each pair of ranks are counted in the same way")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_message_that_nobody_receives_is_an_error(ranks: int, tmp_path: pathlib.Path) -> None:
    code, text = leave_a_message(tmp_path, ranks)
    assert code == 1, text
    assert text.endswith("set MPIGRAD_UNRECEIVED=warn.")


@pytest.mark.full("a table that takes seconds; leave_a_message looks for the profile, too")
def test_the_profile_is_written_before_the_job_ends(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "slow_table.py"
    program.write_text(
        "import time, jax.numpy as jnp, mpigrad as mg\n"
        "from mpigrad.profiling import trace\n"
        "comm, table = mg.default_communicator(), trace.table\n"
        "trace.table = lambda records: time.sleep(2) or table(records)\n"
        "if comm.rank == 0:\n"
        "    mg.send(jnp.ones(3), 1)\n"
        "else:\n"
        "    time.sleep(0.5)  # rank 1 is the last to end, and reports the message\n"
    )
    done = mpigrad("launch", "-n", 2, "--profile", program)
    assert done.returncode == 1, done.stderr
    assert "operations of 2 ranks" in done.stderr


def test_a_program_may_leave_messages(tmp_path: pathlib.Path) -> None:
    code, text = leave_a_message(tmp_path, 2, MPIGRAD_UNRECEIVED="warn")
    assert code == 0, text


def test_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, error in ("", True), ("error", True), ("warn", False):
        monkeypatch.setenv("MPIGRAD_UNRECEIVED", value)
        assert unreceived_is_error() == error
    monkeypatch.setenv("MPIGRAD_UNRECEIVED", "0")
    with pytest.raises(ImportError, match="must be error or warn, got '0'"):
        unreceived_is_error()


@pytest.mark.full("several solves that fail to converge, which take long")
def test_failed_solves_that_are_caught_leave_no_reports() -> None:
    done = mpigrad("launch", "-n", 2, PROGRAMS / "failed_solves.py", MPIGRAD_GUARD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("did not converge") == 1 + hypre_available()
    assert done.stdout.endswith("ends\n")
    assert "sent but never received" not in done.stderr
