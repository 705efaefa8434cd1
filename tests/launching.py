"""Helpers for tests of the command line: run `mpigrad`, and check for remaining processes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator

from mpigrad.launch.launcher import rank_environment
from mpigrad.launch.mpi_installation import find_launcher, mpi_library

PROGRAMS = pathlib.Path(__file__).with_name("programs")
LIMIT = 100.0  # seconds; the machine may be busy


def command(*arguments: object) -> list[str]:
    """Return the words of a `mpigrad` command line."""
    return [sys.executable, "-m", "mpigrad", *map(str, arguments)]


def mpigrad(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the `mpigrad` command to its end."""
    return run(command(*arguments), **environment)


def mpiexec(ranks: int, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ranks under the bare launcher of this MPI, as a user's script would do."""
    launcher = find_launcher(mpi_library())
    started = [launcher.path, "-n", str(ranks), sys.executable, *map(str, words)]
    return run(started, **rank_environment(launcher, ranks), **environment)


@functools.cache
def idling() -> dict[str, str]:
    """Return settings with which ranks sleep while they wait, so that other tests can run."""
    library = pathlib.Path(tempfile.mkdtemp(prefix="mpigrad-idle-")) / "libidle.so"
    words = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(PROGRAMS / "idle.c")]
    subprocess.run(words, check=True)
    atexit.register(shutil.rmtree, library.parent, ignore_errors=True)
    family = find_launcher(mpi_library()).family
    before = os.environ.get("LD_PRELOAD", "")  # of sanitizers, which must come first
    return {**(family.oversubscribed if family else {}), "LD_PRELOAD": f"{before} {library}"}


def on_six_ranks(folder: pathlib.Path, beside: str, *lines: str) -> None:
    """Run these lines on six ranks, with `world`, `alone`, and the tests next to a file."""
    program = folder / "six.py"
    head = (
        "import jax; jax.config.update('jax_enable_x64', True)",
        "import mpigrad",
        "from mpi4py import MPI",
        "world, alone = map(mpigrad.Communicator, (MPI.COMM_WORLD, MPI.COMM_SELF))",
    )
    program.write_text("\n".join([*head, *lines, "print(f'rank {world.rank} of 6: equal')", ""]))
    tests = [str(pathlib.Path(beside).parent), str(PROGRAMS.parent)]
    paths = os.pathsep.join([*tests, os.environ.get("PYTHONPATH", "")])
    done = mpigrad("launch", "-n", 6, program, PYTHONPATH=paths)
    assert done.stdout.count("of 6: equal") == 6, done.stdout + done.stderr


def run(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run any command to its end."""
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env=outside() | environment,
    )


def outside() -> dict[str, str]:
    """Return a user's environment without guard and stored programs, with a fixed text width."""
    names = {*os.environ} - {"MPIGRAD_GUARD", "PYTEST_CURRENT_TEST"}  # this changes meanwhile
    unguarded = {name: os.environ[name] for name in names}
    return {"MPIGRAD_PROGRAMS": "job"} | unguarded | {"COLUMNS": "100"}


@contextlib.contextmanager
def no_orphans() -> Iterator[dict[str, str]]:
    """Give an environment for a job. At the end no process with it may be alive."""
    mark = {"MPIGRAD_TEST_MARK": uuid.uuid4().hex}
    yield mark
    (pair,) = mark.items()

    def alive() -> list[pathlib.Path]:
        return [
            entry
            for entry in pathlib.Path("/proc").iterdir()
            if entry.name.isdigit() and "=".join(pair).encode() in _environment(entry)
        ]

    family = mpi_library().family  # MPICH's mpiexec does not wait for the ranks that it has killed
    limit = time.monotonic() + (3 if family and family.key == "mpich" else 0)
    while (left := alive()) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not left, [(e.name, (e / "cmdline").read_bytes()) for e in left]


def _environment(entry: pathlib.Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
