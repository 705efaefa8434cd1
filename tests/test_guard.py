"""What neither ends nor is refused, and settings; more in guard/."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from launching import PROGRAMS, mpiexec, mpigrad
from mpigrad.guard import timeout_seconds

pytestmark = pytest.mark.launcher


def test_a_rank_without_messages_keeps_nobody_waiting() -> None:
    done = mpigrad("launch", "-n", 3, PROGRAMS / "bystander.py", MPIGRAD_TIMEOUT="20")
    assert done.returncode == 0, done.stderr
    # Lines of two ranks may meet in the launcher's pipe.
    assert sorted(re.findall(r"rank \d: \d\.\d", done.stdout)) == ["rank 0: 2.0", "rank 2: 2.0"]


ALL_OF_IT = pytest.param("1", "1", marks=pytest.mark.full)  # as these tests themselves run


@pytest.mark.parametrize(("guard", "board"), [("0", "1"), ("1", "0"), ALL_OF_IT])
def test_correct_programs_are_let_go(guard: str, board: str) -> None:
    """Without a board messages travel as between hosts, with labels."""
    settings = {"MPIGRAD_GUARD": guard, "MPIGRAD_BOARD": board, "MPIGRAD_TIMEOUT": "30"}
    done = mpigrad("launch", "-n", 2, PROGRAMS / "correct.py", **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all let go\n"
    assert "mpigrad" not in done.stderr


def test_a_program_that_a_rank_starts_is_no_rank(tmp_path: pathlib.Path) -> None:
    """MPI would take it for the rank that has started it, and the job would never end."""
    program = tmp_path / "starts.py"
    program.write_text(
        "import subprocess, sys, mpigrad as mg\n"
        "words = [sys.executable, '-c', 'import mpigrad']\n"
        "done = subprocess.run(words, capture_output=True, text=True)\n"
        "assert 'this process was started by a rank' in done.stderr, done.stderr\n"
        "print(f'sum {float(mg.allreduce(float(done.returncode)))}\\n', end='', flush=True)\n"
    )
    done = mpigrad("launch", "-n", 2, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2


def test_ranks_that_compute_when_others_have_ended_are_let_go(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "computes.py"
    program.write_text(
        "import time, mpigrad as mg\n"
        "rank = mg.communicator.default().rank\n"
        "end = time.monotonic() + 6 * rank\n"
        "while time.monotonic() < end:\n"
        "    pass\n"
        "print(f'rank {rank} is done\\n', end='', flush=True)\n"
    )
    done = mpigrad("launch", "-n", 2, program, MPIGRAD_TIMEOUT="3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done") == 2
    assert "The job goes on" in done.stderr
    assert re.search(r"rank 1: never came: .* \(now at .*:[45]\)", done.stderr)


def test_a_message_that_nobody_receives_is_named_without_the_guard_too() -> None:
    done = mpigrad("launch", "-n", 2, PROGRAMS / "broken.py", "a_message_that_nobody_receives")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 0: 1 message to rank 1 (tag 0), float32[3] by send at ") == 1


@pytest.mark.full
def test_counts_that_disagree_keep_nobody_waiting_without_the_guard() -> None:
    """MPI may take the shorter message: no error, wrong numbers; with the guard it is refused."""
    program = PROGRAMS / "broken.py"
    done = mpigrad("launch", "-n", 2, program, "fewer_rows_than_others_count", MPIGRAD_TIMEOUT="10")
    assert done.returncode == 0, done.stderr
    assert "has waited" not in done.stderr


def test_timeout_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIGRAD_TIMEOUT", raising=False)
    assert timeout_seconds() == 300
    monkeypatch.setenv("MPIGRAD_TIMEOUT", "2.5")
    assert timeout_seconds() == 2.5
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("MPIGRAD_TIMEOUT", wrong)
        with pytest.raises(ImportError, match="MPIGRAD_TIMEOUT"):
            timeout_seconds()


def test_import_after_jax_has_computed() -> None:
    """With several ranks, messages could overtake each other: refused at import."""
    code = "import jax.numpy as jnp; jnp.ones(2).sum(); import mpigrad; print('imported')"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    alone = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert alone.stdout == "imported\n", alone.stderr
    done = mpiexec(2, PROGRAMS / "late_import.py")
    assert done.returncode != 0
    assert "Import mpigrad before the first JAX computation" in done.stderr
