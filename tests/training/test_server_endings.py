"""Programs with a parameter server: four workers at once, and workers that fail or die."""

from __future__ import annotations

import time

import pytest

from launching import PROGRAMS, mpigrad, no_orphans

pytestmark = [pytest.mark.launcher, pytest.mark.waits]


@pytest.mark.full("slow: five processes; test_server checks fewer workers")
def test_layers_of_four_workers_that_send_at_once_do_not_mix() -> None:
    done = mpigrad("launch", "-n", 5, PROGRAMS / "trained.py", "patterns")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " updates" in done.stdout


@pytest.mark.parametrize(
    ("case", "says", "code"),
    [
        ("raises", "LookupError: no file of that name", 1),
        pytest.param(
            "leaves", "SystemExit", 1, marks=pytest.mark.full("ends as an exception does")
        ),
        pytest.param(
            "dies", "rank 2", 137, marks=pytest.mark.full("the guard tests check killed ranks")
        ),
    ],
)
def test_a_worker_takes_all_along(case: str, says: str, code: int) -> None:
    start = time.monotonic()
    with no_orphans() as mark:
        done = mpigrad("launch", "-n", 3, PROGRAMS / "trained.py", case, **mark)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert says in said, said
    assert time.monotonic() - start < 60  # on a busy machine, most of it for starting
