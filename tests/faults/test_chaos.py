"""Faults of the machine under running jobs: none that can go on is ended, and no other one lives.

CHAOS_ROUNDS sets the number of jobs, and CHAOS_SEED the first seed.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable

import pytest

from launching import PROGRAMS, command, idling, no_orphans, outside
from tiers import ALL

pytestmark = [pytest.mark.launcher, pytest.mark.waits]

LIMIT = 12.0  # seconds that an operation may wait
SECONDS = 3.0 if ALL else 1.0  # of work in each job
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "40"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))


@dataclasses.dataclass
class Job:
    """The launcher of programs/random_messages.py, and its ranks."""

    process: subprocess.Popen[str]
    pids: list[int]
    clock: pathlib.Path  # seconds that are added to the time of day on all ranks, an int64


def stop_for_a_while(job: Job, dice: random.Random) -> None:
    """Stop one rank, for longer than a deadlock takes to be reported."""
    pid = dice.choice(job.pids)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(dice.uniform(1.0, 8.0))
    os.kill(pid, signal.SIGCONT)


def stop_all_for_a_while(job: Job, dice: random.Random) -> None:
    """Suspend the job for longer than an operation may wait, as schedulers do."""
    for pid in job.pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(LIMIT + 3)
    for pid in job.pids:
        os.kill(pid, signal.SIGCONT)


def take_file_descriptors(job: Job, dice: random.Random, *others: Callable[..., None]) -> None:
    """Leave one rank without a file descriptor, and let it wait for another one meanwhile."""
    pid, other = dice.sample(job.pids, 2)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    os.kill(other, signal.SIGSTOP)
    for fault in others:
        fault(job, dice)
    time.sleep(9.0)
    with contextlib.suppress(ProcessLookupError):  # it has done its work, or was wrongly ended
        os.kill(other, signal.SIGCONT)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def kill(job: Job, dice: random.Random) -> None:
    """Kill one rank."""
    os.kill(dice.choice(job.pids), signal.SIGKILL)


def stop(job: Job, dice: random.Random) -> None:
    """Stop one rank for ever."""
    os.kill(dice.choice(job.pids), signal.SIGSTOP)


def kill_without_file_descriptors(job: Job, dice: random.Random) -> None:
    """Kill one rank while another one has no file descriptor."""
    pid, other = dice.sample(job.pids, 2)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    os.kill(other, signal.SIGKILL)


def set_the_clock(job: Job, dice: random.Random) -> None:
    """Set the time of day forward by an hour, then back by a day."""
    for seconds in (3600, -86400):
        with job.clock.open("r+b") as file:
            file.write(struct.pack("q", seconds))
        time.sleep(dice.uniform(0.1, 1.0))


def set_the_clock_and_take_file_descriptors(job: Job, dice: random.Random) -> None:
    """Let both happen to one job, which takes less time than two."""
    take_file_descriptors(job, dice, set_the_clock)


def take_memory(job: Job, dice: random.Random) -> None:
    """Leave one rank with the addresses that it has, and a few MiB more."""
    pid = dice.choice(job.pids)
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + dice.randrange(1 << 22)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


HARMLESS = (
    stop_for_a_while,
    stop_all_for_a_while,
    take_file_descriptors,
    set_the_clock,
    set_the_clock_and_take_file_descriptors,
)
# The job goes on, or it ends in time with an error.
EITHER = (take_memory,)
FATAL = (kill, stop, kill_without_file_descriptors)


@functools.cache
def clock_library() -> pathlib.Path:
    """Compile the clock that can be set."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mpigrad-clock-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libclock.so"
    source = pathlib.Path(__file__).with_name("clock.c")
    words = ["cc", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(words, check=True)
    return library


def run(seed: int, fault, tmp_path: pathlib.Path) -> tuple[int, float, str]:
    """Run one job with one fault. Return its exit code, its seconds after the fault and output."""
    dice = random.Random(seed)
    clock = tmp_path / f"{seed}.clock"
    clock.write_bytes(bytes(8))
    ranks = dice.choice([2, 3])
    words = ["launch", "-n", ranks, PROGRAMS / "random_messages.py", seed, SECONDS]
    guard = {"MPIGRAD_GUARD": str(dice.randrange(2)), "MPIGRAD_TIMEOUT": str(LIMIT)} | idling()
    if fault in (set_the_clock, set_the_clock_and_take_file_descriptors):
        guard["LD_PRELOAD"] += f" {clock_library()}"
        guard["CLOCK_OFFSET"] = str(clock)
    output = tmp_path / f"{seed}.txt"
    with (
        no_orphans() as mark,
        output.open("w") as file,
        subprocess.Popen(
            command(*words), stdout=file, stderr=subprocess.STDOUT, env=outside() | mark | guard
        ) as process,
    ):
        end = time.monotonic() + 60
        pids: list[int] = []
        while len(pids) < ranks and time.monotonic() < end and process.poll() is None:
            time.sleep(0.05)
            pids = [int(n) for n in re.findall(r"has pid (\d+)", output.read_text())]
        assert len(pids) == ranks, output.read_text()
        time.sleep(dice.uniform(0.0, SECONDS / 3))
        fault(Job(process, pids, clock), dice)
        start = time.monotonic()
        try:
            code = process.wait(timeout=4 * LIMIT + 20)
        finally:
            process.kill()
    return code, time.monotonic() - start, output.read_text()[-3000:]


def check(seed: int, fault, tmp_path: pathlib.Path) -> None:
    code, seconds, output = run(seed, fault, tmp_path)
    what = f"seed {seed}, {fault.__name__}: exit code {code} after {seconds:.1f} s\n{output}"
    if fault in HARMLESS or (fault in EITHER and code == 0):
        assert code == 0, what
        assert "done " in output, what
        assert "mpigrad:" not in output, what  # nothing is wrong, so nothing is said
    else:
        assert code != 0, what
        assert seconds < 2 * LIMIT + 15, what  # the limit, the report, and a machine that is busy


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "fault",
    [set_the_clock_and_take_file_descriptors, take_memory, kill],
    ids=lambda f: f.__name__,
)
def test_one_fault(tmp_path: pathlib.Path, fault) -> None:
    check(SEED, fault, tmp_path)


@pytest.mark.full("test_one_fault runs three of these jobs")
@pytest.mark.timeout(7200)
def test_many_faults(tmp_path: pathlib.Path) -> None:
    counts: dict[str, int] = {}
    for seed in range(SEED, SEED + ROUNDS):
        fault = random.Random(-seed).choice(HARMLESS + EITHER + FATAL)
        check(seed, fault, tmp_path)
        counts[fault.__name__] = counts.get(fault.__name__, 0) + 1
    print(f"seeds {SEED} to {SEED + ROUNDS - 1}: {counts}")
