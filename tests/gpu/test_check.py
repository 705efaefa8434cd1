"""The check of a GPU machine, on CPUs: its programs, its steps and its page."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

CHECK = pathlib.Path(__file__).with_name("check.py")


def run(output: pathlib.Path, *words: str) -> list[dict[str, object]]:
    """Run the check on CPUs, and return the results of its steps."""
    command = [sys.executable, str(CHECK), "--cpu", "--output", str(output), *words]
    environment = dict(os.environ)  # without what MPI has set in this process by itself
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, env=environment)
    (page,) = output.glob("check-*.txt")
    assert done.returncode == 0, done.stdout + done.stderr + page.read_text()
    (rows,) = output.glob("check-*.json")
    return json.loads(rows.read_text())


@pytest.mark.launcher
def test_a_step_of_each_kind(tmp_path: pathlib.Path) -> None:
    """Numbers from rank 0, a job that must fail, and a whole command."""
    names = ("fft, 2 ranks", "a rank raises", "versions")
    results = run(tmp_path / "out", "--only", *names)
    assert sorted(str(result["step"]) for result in results) == sorted(names)
    assert all(result["passed"] for result in results)


@pytest.mark.full("test_a_step_of_each_kind runs three of its steps")
@pytest.mark.long("this is the whole check, of 33 jobs")
@pytest.mark.launcher
def test_the_whole_check(tmp_path: pathlib.Path) -> None:
    results = run(tmp_path / "out")
    assert len(results) > 25
