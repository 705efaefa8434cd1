"""Faults of input and output below Python: nothing is lost, and all ranks raise or go on."""

from __future__ import annotations

import os
import pathlib
import subprocess
import time

import pytest

from launching import command, idling, outside

pytestmark = [pytest.mark.launcher, pytest.mark.waits, pytest.mark.timeout(2700)]

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("faults") / "libfaults.so"
    words = ["cc", "-O1", "-Wall", "-shared", "-fPIC", "-o", path, HERE / "faults.c", "-ldl"]
    subprocess.run(words, check=True)
    return path


def play(
    library: pathlib.Path, folder: pathlib.Path, seed: int, rounds: int, limit: float, *ways: str
) -> int:
    """Play rounds on two ranks and return how many faults have struck."""
    settings = idling() | {"MPIGRAD_TIMEOUT": "30"}
    settings["LD_PRELOAD"] += f" {library}"
    words = command("launch", "--timeout", limit, "-n", 2, HERE / "rounds.py")
    done = subprocess.run(
        [*words, folder, str(seed), "0", str(rounds), *ways],
        capture_output=True,
        text=True,
        timeout=limit + 30,
        check=False,
        env=outside() | settings,
    )
    current = folder / "current"
    last = current.read_text() if current.exists() else "before the first round"
    print(done.stdout)
    assert done.returncode == 0, f"last {last}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"seed {seed}: "))
    return int(line.split()[2])


def test_twenty_faults(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert play(library, tmp_path, 2, 24, 150.0, "saves") >= 20


@pytest.mark.full("a hundred times as many; test_twenty_faults has those of saves")
def test_two_thousand_faults(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Another seed each time. It is printed, and a round of it can be repeated."""
    seed = int(os.environ.get("MPIGRAD_SEED", time.time()))
    assert play(library, tmp_path, seed, rounds=2400, limit=2400.0) >= 2000
