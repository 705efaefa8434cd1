"""The right launcher starts the ranks, and all of them end whatever happens."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from launching import LIMIT, PROGRAMS, _environment, command, mpigrad, no_orphans, outside, run
from mpigrad import checkpoint
from mpigrad.launch import launcher, mpi_installation
from mpigrad.launch.mpi_installation import Library
from mpigrad.runtime.world import MPIError, world_around

pytestmark = [pytest.mark.launcher, pytest.mark.waits]


@contextlib.contextmanager
def started(*arguments: object, until: str) -> Iterator[subprocess.Popen[str]]:
    """Start `mpigrad launch` and wait until its program prints `until`."""
    with (
        no_orphans() as mark,
        subprocess.Popen(
            command("launch", "--timeout", 60, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=outside() | mark,
        ) as job,
    ):
        assert job.stdout is not None
        for line in job.stdout:
            if until in line:
                break
        yield job
        assert job.wait(LIMIT) is not None


# ---- a job that ends by itself ----


def test_every_rank_runs_with_its_arguments() -> None:
    done = mpigrad("launch", "-n", 3, PROGRAMS / "say.py", "-n", "7", "--help", "a b")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == [f"rank {r} of 3: ['-n', '7', '--help', 'a b']" for r in range(3)]
    assert lines[3] == "threads 1 terminal 0"


def test_a_module_runs_like_a_program() -> None:
    done = mpigrad("launch", "-n", 2, "-m", "mpi4py.bench", "helloworld")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Hello, World!") == 2


@pytest.mark.parametrize(
    ("way", "codes", "said"),
    [
        ("raise", {1}, "ValueError: rank 1 has had enough"),
        ("exit", {3}, "the job failed with exit code 3"),
        # MPICH's mpiexec may tell how it ended the others, and gives a signal's bare number.
        ("vanish", {4, 9}, ""),
        ("kill", {137, 9}, ""),
    ],
)
def test_a_rank_that_ends_early_ends_the_others(way: str, codes: set[int], said: str) -> None:
    with no_orphans() as mark:
        start = time.monotonic()
        done = mpigrad("launch", "-n", 3, "--timeout", 60, PROGRAMS / "fail.py", way, **mark)
    assert done.returncode in codes, done.stderr
    assert time.monotonic() - start < 50
    assert done.stderr.count(said) == 1 or not said
    assert "mpigrad: the job" in done.stderr


def test_the_settings_of_the_user_are_kept() -> None:
    done = mpigrad("launch", PROGRAMS / "say.py", OMP_NUM_THREADS="3")
    assert "threads 3 " in done.stdout, done.stderr


def test_a_child_that_holds_the_output_is_named(tmp_path: pathlib.Path) -> None:
    """Mpiexec waits for it after the ranks have ended."""
    program = tmp_path / "leaves_a_child.py"
    program.write_text(
        "import subprocess\n"
        "from mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    subprocess.Popen(['sleep', '8'])\n"
    )
    done = mpigrad("launch", "-n", 2, "--timeout", 60, program)
    assert done.returncode == 0, done.stderr
    assert "all ranks have ended, but mpiexec waits for processes" in done.stderr
    assert "(sleep). Wait for them in a rank" in done.stderr


# ---- a job that has to be ended ----


@pytest.mark.full("measures time, and needs a quiet machine")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_of_large_arrays_is_kept() -> None:
    """The kernel clears each new page: 32 huge pages for each array of 64 MiB."""
    done = mpigrad("launch", "-n", 2, PROGRAMS / "large_arrays.py")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.partition("of a call: ")[2]) < 16, done.stdout


def test_the_time_limit_ends_every_rank() -> None:
    with no_orphans() as mark:
        start = time.monotonic()
        done = mpigrad("launch", "-n", 3, "--timeout", 3, PROGRAMS / "fail.py", "hang", **mark)
    assert done.returncode == 124
    assert "the time limit of 3 s is over" in done.stderr
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_listens_may_save(number: signal.Signals) -> None:
    with started("-n", 2, PROGRAMS / "interruptible.py", until="working") as job:
        job.send_signal(number)
        output, errors = job.communicate(timeout=LIMIT)
    assert "saved" in output
    assert f"{number.name}: asked the job to save and end" in errors
    assert job.returncode == 5, "the exit code is the job's own"


def test_the_second_interrupt_ends_the_job_at_once() -> None:
    with started("-n", 2, PROGRAMS / "interruptible.py", "stubborn", until="working") as job:
        job.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert job.poll() is None
        job.send_signal(signal.SIGINT)
        output, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 130
    assert "SIGINT again: ending all ranks" in errors
    assert "saved" not in output


def test_a_job_has_its_grace_and_no_more() -> None:
    arguments = ("--grace", 1, "-n", 2, PROGRAMS / "interruptible.py", "stubborn")
    with started(*arguments, until="working") as job:
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 128 + signal.SIGTERM
    assert "did not end within 1 s" in errors


def test_the_grace_time_waits_for_a_report() -> None:
    """The report takes longer than the grace time, which begins after it."""
    arguments = ("--grace", 2, "-n", 2, PROGRAMS / "interruptible.py", "report")
    with started(*arguments, until="working") as job:
        job.send_signal(signal.SIGTERM)
        output, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 5, errors
    assert "saved" in output


def test_a_job_that_does_not_listen_ends_at_once() -> None:
    with started("-n", 2, PROGRAMS / "fail.py", "hang", until="hanging") as job:
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=LIMIT)
    assert job.returncode == 130
    assert "SIGINT: ending all ranks" in errors


def test_the_ranks_end_with_a_launcher_that_is_killed() -> None:
    with started("-n", 2, PROGRAMS / "fail.py", "hang", until="hanging") as job:
        environment = _environment(pathlib.Path(f"/proc/{job.pid}"))
        (mark,) = (word for word in environment if word.startswith(b"MPIGRAD_TEST_MARK="))
        job.kill()
        job.communicate(timeout=LIMIT)
        limit = time.monotonic() + 6  # mpiexec ends its ranks, the hard way after some seconds
        while time.monotonic() < limit and any(
            mark in _environment(p) for p in pathlib.Path("/proc").glob("[0-9]*")
        ):
            time.sleep(0.1)


# ---- which launcher, which world ----


@pytest.mark.parametrize(
    ("library", "mpiexec", "family"),
    [
        ("Open MPI v4.1.4, package: Debian OpenMPI", "mpiexec (OpenRTE) 4.1.4", "openmpi-4"),
        ("Open MPI v5.0.11, package: Open MPI", "mpiexec (Open MPI) 5.0.11", "openmpi-5"),
        ("MPICH Version:      5.0.2", "HYDRA build details:\n    Version: 5.0.2", "mpich"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", "Intel(R) MPI Library for Linux*", "mpich"),
    ],
)
def test_every_mpi_has_its_settings(
    library: str, mpiexec: str, family: str, tmp_path: pathlib.Path
) -> None:
    program = _program(tmp_path / "mpiexec", f"cat <<'END'\n{mpiexec}\nEND")
    of_library = mpi_installation.family_of_library(library)
    of_launcher = mpi_installation.identify(str(program)).family
    assert of_library is not None and of_library.key == family
    assert of_launcher is not None and of_launcher.key == family


def test_the_launcher_belongs_to_the_library() -> None:
    library = mpi_installation.mpi_library()
    assert library.family is not None
    found = mpi_installation.find_launcher(library)
    assert found.family == library.family


def _other_launcher(directory: pathlib.Path) -> pathlib.Path:
    """Create a launcher whose version text is that of another MPI."""
    ours = mpi_installation.mpi_library().family
    says = "mpiexec (OpenRTE) 4.1.4" if ours and ours.key == "mpich" else "HYDRA build details"
    return _program(directory / "mpiexec", f"echo '{says}'")


def _program(path: pathlib.Path, script: str) -> pathlib.Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_rejects_the_launcher_of_another_mpi(tmp_path: pathlib.Path) -> None:
    other = _other_launcher(tmp_path)
    done = mpigrad("launch", "-n", 2, PROGRAMS / "say.py", MPIGRAD_MPIEXEC=str(other))
    assert done.returncode == 1
    assert "which belongs to another MPI" in done.stderr
    assert "MPIGRAD_MPIEXEC=/path/to/mpiexec" in done.stderr


def test_a_foreign_launcher_on_path_is_passed_over(tmp_path: pathlib.Path) -> None:
    _other_launcher(tmp_path)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = mpigrad("launch", "-n", 2, PROGRAMS / "say.py", PATH=path)
    assert done.returncode == 0, done.stderr


def test_no_launcher_at_all(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    family = mpi_installation.family_of_library("Open MPI v4.1.4")
    library = Library("Open MPI 4", f"{tmp_path}/lib/a/b/c/libmpi.so.40", "4.1", family)
    with pytest.raises(MPIError, match="no mpiexec found for Open MPI 4") as caught:
        mpi_installation.find_launcher(library)
    assert "apt-get install openmpi-bin" in str(caught.value)
    _program(tmp_path / "mpiexec", "echo HYDRA")
    with pytest.raises(MPIError, match="belongs to another MPI"):
        mpi_installation.find_launcher(library)


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, 4),
        ({"PMI_SIZE": "3", "PMI_RANK": "2"}, 3),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "2"}, 5),
        ({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "5", "SLURM_PROCID": "0"}, None),  # sbatch
        ({"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "5"}, None),  # salloc's shell
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --pty bash
    ],
)
def test_the_world_around_is_recognised(environment: dict[str, str], size: int | None) -> None:
    around = world_around(environment)
    if size is None:
        assert around is None
    else:
        assert around is not None and (around.size, around.rank) == (size, 2)


def test_the_launcher_of_another_mpi_is_noticed_by_the_ranks() -> None:
    """mpiexec of another MPI sets its variables, but MPI sees a world of one rank."""
    ours = mpi_installation.mpi_library().family
    variable = "OMPI_COMM_WORLD_SIZE" if ours and ours.key == "mpich" else "PMI_SIZE"
    done = run([sys.executable, "-c", "import mpigrad"], **{variable: "4"})
    assert done.returncode != 0
    assert "has started 4 ranks, but MPI sees 4 worlds of size 1" in done.stderr
    assert "mpigrad launch -n 4" in done.stderr


def test_inside_a_launcher_nothing_is_launched() -> None:
    found = mpi_installation.find_launcher(mpi_installation.mpi_library())
    environment = launcher.rank_environment(found, 2)
    start = [found.path, "-n", "2"]
    done = run([*start, *command("launch", PROGRAMS / "say.py")], **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [f"rank {r} of 2: []" for r in range(2)]
    done = run([*start, *command("launch", "-n", 3, PROGRAMS / "say.py")], **environment)
    assert done.returncode != 0
    assert done.stderr.count("has started 2 ranks here. Leave -n out") == 1


# ---- interruption, in one process ----


def test_interruption_is_a_signal_or_a_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIGRAD_STOP_FILE", str(tmp_path / "stop"))
    before = signal.getsignal(signal.SIGTERM)
    with checkpoint.listen() as stop:
        assert not stop.requested()
        (tmp_path / "stop").touch()
        assert stop.requested()
    (tmp_path / "stop").unlink()
    with checkpoint.listen() as stop:
        assert not stop.requested()
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_request_ends_the_whole_program_and_not_only_its_present_part() -> None:
    with checkpoint.listen() as outer:
        with checkpoint.listen() as inner:
            signal.raise_signal(signal.SIGTERM)
            assert inner.requested()
        with checkpoint.listen() as inner:
            assert outer.requested() and inner.requested()
    with checkpoint.listen() as later:
        assert not later.requested()


def test_second_interruption_raises_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), checkpoint.listen() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested()
        signal.raise_signal(signal.SIGINT)


def test_the_clock_of_another_host_does_not_end_a_job(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds after an abort count from when the launcher sees it, not from the file's time."""
    none: dict[str, str] = {launcher._MARK: "x"}
    stop = tmp_path / "stop"
    job = launcher._Job([], none, stop, 1.0, 1.0, False, False, False)
    assert not job._aborted_long_ago()
    (tmp_path / "aborted").touch()
    hour_ago = time.time() - 3600
    os.utime(tmp_path / "aborted", (hour_ago, hour_ago))
    assert not job._aborted_long_ago()
    now = time.monotonic() + launcher._AFTER_ABORT + 1
    monkeypatch.setattr(launcher.time, "monotonic", lambda: now)
    assert job._aborted_long_ago()
