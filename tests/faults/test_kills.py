"""Runs that are killed at any moment continue as if nothing had happened."""

from __future__ import annotations

import contextlib
import dataclasses
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

from launching import PROGRAMS, command, idling, no_orphans, outside

pytestmark = [pytest.mark.launcher, pytest.mark.waits]

LIMIT = 200.0  # seconds
KILLED = {137, 9}  # of the launchers of Open MPI and MPICH


@dataclasses.dataclass(frozen=True)
class Run:
    """programs/resumed.py in a directory. It can be started several times."""

    way: str
    directory: pathlib.Path
    steps: int
    ranks: int

    @contextlib.contextmanager
    def started(self, die: str = "") -> Iterator[Job]:
        """Start a job and wait for its first step."""
        words = command("launch", "--timeout", LIMIT, "-n", self.ranks, PROGRAMS / "resumed.py")
        with (
            no_orphans() as mark,
            subprocess.Popen(
                [*words, self.way, str(self.directory), str(self.steps), *filter(None, [die])],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=outside() | idling() | self.compiled | mark,
            ) as process,
        ):
            job = Job(process, self.ranks)
            yield job
            job.end()

    @property
    def compiled(self) -> dict[str, str]:
        """Settings with which the runs of a test share compiled programs."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.directory.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def finished(self) -> np.ndarray:
        """Continue the run to its end and return the result."""
        with self.started() as job:
            assert job.end() == 0, job.said
        return np.load(self.directory / "result.npy")

    def kill_at_a_random_moment(self, upto: int, dice: random.Random) -> None:
        """Send SIGKILL to a random rank, at a random time after a random step before `upto`."""
        with self.started() as job:
            job.reach(dice.randint(job.first + 1, max(job.first + 1, upto - 2)))
            time.sleep(dice.uniform(0, 0.01))
            os.kill(job.pids[dice.randrange(self.ranks)], signal.SIGKILL)
            assert job.end() in KILLED, job.said

    def kill_within_a_save(self, rank: int, call: int) -> None:
        """Let a rank kill itself at that call of os.fsync or os.rename."""
        with self.started(die=f"{rank}:{call}") as job:
            assert job.end() in KILLED, job.said

    def unfinished(self) -> bool:
        """Return whether a save was not finished."""
        return bool(list(self.directory.glob(".unfinished-*")))


class Job:
    """The processes of a job's ranks, its first step, and its present step."""

    def __init__(self, process: subprocess.Popen[str], ranks: int) -> None:
        self.process = process
        self.pids: dict[int, int] = {}
        self.first = self.step = 0
        self.said = ""
        while len(self.pids) < ranks and self._read():
            pass

    def _read(self) -> bool:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
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
        if self.process.poll() is None or not self.process.stdout.closed:  # type: ignore[union-attr]
            output, errors = self.process.communicate(timeout=LIMIT + 10)
            self.said = (self.said + output + errors)[-3000:]
        return self.process.returncode


@pytest.mark.long("three jobs; tests/optimize/test_restart.py restarts without jobs of its own")
def test_a_run_killed_in_a_save_has_the_same_result(tmp_path: pathlib.Path) -> None:
    """Kill it when the third save is about to be renamed."""
    whole = Run("loop", tmp_path / "whole", 6, 2).finished()
    run = Run("loop", tmp_path / "killed", 6, 2)
    # Rank 0 has six calls in each of the first saves: its file, the directory, the manifest, the
    # directory, the rename, the parent directory.
    run.kill_within_a_save(0, 2 * 6 + 5)
    assert run.unfinished()
    assert np.array_equal(run.finished(), whole)
    assert not run.unfinished()


@pytest.mark.full("four jobs; test_a_run_killed_in_a_save_has_the_same_result is shorter")
def test_a_killed_run_has_the_same_result(tmp_path: pathlib.Path) -> None:
    """Kill it at a random moment, and when the third save is about to be renamed."""
    whole = Run("minimize", tmp_path / "whole", 40, 2).finished()
    run = Run("minimize", tmp_path / "killed", 40, 2)
    run.kill_at_a_random_moment(15, random.Random(1))
    # Rank 0 also renames the oldest save, in the end.
    run.kill_within_a_save(0, 2 * 7 + 5)
    assert run.unfinished()
    assert np.array_equal(run.finished(), whole)
    assert not run.unfinished()


@pytest.mark.full("test_a_run_killed_in_a_save_has_the_same_result kills once")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("way", "ranks"), [("loop", 3), ("minimize", 2)])
def test_a_hundred_kills(tmp_path: pathlib.Path, way: str, ranks: int) -> None:
    """The result is bitwise the same, also after a signal to save and end."""
    seed = int(os.environ.get("MPIGRAD_SEED", time.time()))
    print(f"seed {seed}")
    dice, kills, within = random.Random(seed), 100, 0
    steps = 4 * kills + 100  # enough after the last kill for a run that is asked to stop
    whole = Run(way, tmp_path / "whole", steps, ranks).finished()
    run = Run(way, tmp_path / "killed", steps, ranks)
    for kill in range(kills):
        if kill % 2:
            run.kill_within_a_save(dice.randrange(ranks), dice.randint(1, 20))
        else:
            run.kill_at_a_random_moment(4 * (kill + 1), dice)
        within += run.unfinished()
    assert within >= kills // 4
    with run.started() as job:
        job.reach(job.first + 3)
        job.process.send_signal(signal.SIGUSR1)
        assert job.end() == 0, job.said
    assert "stopped" in job.said
    assert np.array_equal(run.finished(), whole)


@pytest.mark.full("tests/optimize/test_restart.py restarts on fewer ranks without a launcher")
@pytest.mark.parametrize("way", ["loop", "minimize"])
def test_other_counts_of_ranks_agree_to_rounding(tmp_path: pathlib.Path, way: str) -> None:
    """Compare five steps after the restart, because rounding errors grow with further steps."""
    Run(way, tmp_path / "2", 30, 2).finished()
    for ranks in (1, 3):
        shutil.copytree(tmp_path / "2", tmp_path / f"{ranks}")
    same, fewer, more = (Run(way, tmp_path / f"{n}", 35, n).finished() for n in (2, 1, 3))
    assert np.allclose(fewer, same, rtol=1e-9, atol=1e-12)
    assert np.allclose(more, same, rtol=1e-9, atol=1e-12)
