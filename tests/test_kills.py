"""Runs that are killed at any moment, and go on as if they never had been."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import pytest

from launching import LIMIT, PROGRAMS, command, no_orphans, outside

pytestmark = pytest.mark.launcher

KILLED = {137, 9}  # of the launchers of Open MPI and MPICH


@contextlib.contextmanager
def running(directory: pathlib.Path, steps: int, ranks: int, die: str = "") -> Iterator[Run]:
    """A run of programs/resumed.py that has begun its first step."""
    words = command("launch", "--timeout", 90, "-n", ranks, PROGRAMS / "resumed.py")
    with (
        no_orphans() as mark,
        subprocess.Popen(
            [*words, str(directory), str(steps), *filter(None, [die])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=outside() | mark,
        ) as job,
    ):
        run = Run(job, ranks)
        yield run
        run.end()


class Run:
    """A job, its ranks' processes, and the step it is in."""

    def __init__(self, job: subprocess.Popen[str], ranks: int) -> None:
        self.job = job
        self.pids: dict[int, int] = {}
        self.first = self.step = 0
        self.said = ""
        while len(self.pids) < ranks and self._read():
            pass

    def _read(self) -> bool:
        assert self.job.stdout is not None
        line = self.job.stdout.readline()
        words = line.split()
        if words[:1] == ["rank"]:
            self.pids[int(words[1])] = int(words[3])
            self.first = self.step = int(words[5])
        elif words[:1] == ["step"]:
            self.step = int(words[1])
        self.said += line
        return bool(line)

    def reach(self, step: int) -> None:
        while self.step < step and self._read():
            pass

    def end(self) -> int:
        output, errors = self.job.communicate(timeout=LIMIT)
        self.said += output + errors
        return self.job.returncode


def finished(directory: pathlib.Path, steps: int, ranks: int) -> np.ndarray:
    """The result of a run to its end, from where it was."""
    with running(directory, steps, ranks) as run:
        assert run.end() == 0, run.said
    return np.load(directory / "result.npy")


def kill_at_a_random_moment(
    directory: pathlib.Path, steps: int, ranks: int, upto: int, dice: random.Random
) -> None:
    """SIGKILL to any rank, some time after it has reached some step before `upto`."""
    with running(directory, steps, ranks) as run:
        assert run.first < upto
        run.reach(dice.randint(run.first + 1, max(run.first + 1, upto - 2)))
        time.sleep(dice.uniform(0, 0.01))
        os.kill(run.pids[dice.randrange(ranks)], signal.SIGKILL)
        assert run.end() in KILLED, run.said


def kill_within_a_save(
    directory: pathlib.Path, steps: int, ranks: int, rank: int, call: int
) -> None:
    with running(directory, steps, ranks, die=f"{rank}:{call}") as run:
        assert run.end() in KILLED, run.said
    assert len(list(directory.glob("save-*"))) in (0, 1, 2, 3)


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_was_not(tmp_path: pathlib.Path) -> None:
    """Bit for bit on as many ranks, to rounding on others; a signal to save and end included."""
    dice, steps, run_of = random.Random(1), 60, tmp_path / "killed"
    whole = finished(tmp_path / "whole", steps, 2)
    kill_at_a_random_moment(run_of, steps, 2, 25, dice)
    # Of rank 0's seven calls in a save (its file, the directory, the manifest, the directory, the
    # rename, the directory above; the rename of the oldest) the fifth, in the third save.
    kill_within_a_save(run_of, steps, 2, 0, 2 * 7 + 5)
    assert list(run_of.glob(".unfinished-*"))
    with running(run_of, steps, 2) as run:
        run.reach(run.first + 3)
        run.job.send_signal(signal.SIGUSR1)
        assert run.end() == 0, run.said
    assert "stopped" in run.said
    shutil.copytree(run_of, tmp_path / "other")
    kill_within_a_save(run_of, steps, 2, 1, 5)
    assert np.array_equal(finished(run_of, steps, 2), whole)
    assert not list(run_of.glob(".unfinished-*"))
    other = finished(tmp_path / "other", steps, 1)
    assert np.allclose(other, whole, rtol=1e-12, atol=0)
    assert not np.array_equal(other, np.ones_like(other))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_twenty_kills(tmp_path: pathlib.Path, ranks: int) -> None:
    dice, steps = random.Random(ranks), 450
    whole = finished(tmp_path / "whole", steps, ranks)
    run_of, within = tmp_path / "killed", 0
    for kill in range(20):
        if kill % 2:
            kill_within_a_save(run_of, steps, ranks, dice.randrange(ranks), dice.randint(1, 60))
        else:
            kill_at_a_random_moment(run_of, steps, ranks, 19 * (kill + 1), dice)
        within += bool(list(run_of.glob(".unfinished-*")))
    assert within >= 5
    assert np.array_equal(finished(run_of, steps, ranks), whole)
