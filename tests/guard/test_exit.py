"""The end of a program, and an error at a prompt."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import jax
import pytest

from launching import PROGRAMS, no_orphans, outside, run
from mpigrad.launch.launcher import rank_environment
from mpigrad.launch.mpi_installation import find_launcher, mpi_library
from tiers import ALL

pytestmark = [pytest.mark.launcher, pytest.mark.waits]


def python(*words: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run two ranks under a bare mpiexec. `typed` is the input of rank 0."""
    launcher = find_launcher(mpi_library())
    with no_orphans() as mark:
        return subprocess.run(
            [launcher.path, "-n", "2", sys.executable, *words],
            input=typed,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env=outside() | rank_environment(launcher, 2) | mark | environment,
        )


@pytest.mark.parametrize(
    "order",
    [
        "jax mpi4py.MPI mpigrad",  # at exit JAX's queue ends after MPI
        pytest.param("mpi4py.MPI mpigrad", marks=pytest.mark.full("another order of imports")),
        pytest.param("mpigrad jax", marks=pytest.mark.full("another order of imports")),
        pytest.param("jax.numpy mpigrad", marks=pytest.mark.full("another order of imports")),
    ],
)
def test_messages_end_before_mpi_does(order: str) -> None:
    done = python(str(PROGRAMS / "ending.py"), *order.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("at exit 1.0") == 2  # lines of two ranks may meet in the pipe
    assert done.stderr == ""


# Threads that call and return all the time: reading their frames without Python's lock crashes.
UNREACHED = """
import collections, os, threading, time, mpigrad
from mpi4py import MPI
from mpigrad.guard import failure

class Deaf(MPI.Intracomm):  # a launcher that is too busy to end this rank
    def Abort(self, code=1):
        time.sleep(60)

def deep(n):
    return n and deep(n - 1)

def call():
    while True:
        for n in range(200, 400, 20):
            deep(n)

failure._UNREACHED = 0.05
codes = collections.Counter()
for _ in range(FORKS):
    child = os.fork()
    if child == 0:
        threading.Thread(target=call, daemon=True).start()
        MPI.COMM_WORLD = Deaf(MPI.COMM_WORLD)
        failure._abort(3)
    codes[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1
print(dict(codes), flush=True)
"""


def test_a_rank_that_mpi_does_not_end_ends_itself_without_a_crash() -> None:
    forks = "80" if ALL else "16"
    done = run([sys.executable, "-W", "ignore", "-c", UNREACHED.replace("FORKS", forks)])
    assert done.stdout == f"{{1: {forks}}}\n", done.stdout + done.stderr


def test_mpi_without_threads_is_refused() -> None:
    lines = "import mpi4py", "mpi4py.rc.thread_level = 'serialized'", "import mpigrad as m; m.grad"
    done = run([sys.executable, "-c", "\n".join(lines)])
    assert done.returncode != 0
    assert "ImportError: mpigrad: MPI was initialised without MPI_THREAD_MULTIPLE" in done.stderr
    assert "Leave mpi4py.rc.thread_level at 'multiple', or call MPI.Init_thread(" in done.stderr


def test_mpi_that_is_not_initialised_is_refused() -> None:
    lines = "import mpi4py", "mpi4py.rc.initialize = False", "import mpigrad"
    done = python("-c", "\n".join(lines))
    assert done.returncode != 0
    assert "ImportError: mpigrad: expected an initialised MPI" in done.stderr


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="a forked child of a program that has compiled with JAX 0.8 or 0.9 may not end",
)
@pytest.mark.parametrize(
    "traced",
    [False, pytest.param(True, marks=pytest.mark.full("the same program, with a trace"))],
    ids=["", "traced"],
)
@pytest.mark.long("many ways to end a forked child; test_guard has the import in one child")
def test_children_of_ranks_end_without_mpi(traced: bool, tmp_path: pathlib.Path) -> None:
    trace = {"MPIGRAD_TRACE": str(tmp_path / "trace.json")} if traced else {}
    done = python(str(PROGRAMS / "forked.py"), **trace)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        codes = "[1, 1, 5, 6]" if rank == 0 else "[3, 4, 0]"
        assert f"rank {rank}: {codes}, still 2" in done.stdout
    assert done.stdout.count("child of 1 at its end") == 1
    assert done.stderr.count("ArithmeticError: in a child of 0") == 1
    assert "signal" not in done.stderr.lower()


def input_ends() -> bool:
    """Return True if the input of the other ranks ends. It does not with mpiexec of MPICH 5.0."""
    launcher = find_launcher(mpi_library())
    environment = outside() | rank_environment(launcher, 2)
    words = [launcher.path, "-n", "2", "cat"]
    try:
        subprocess.run(words, input="", text=True, timeout=10, check=True, env=environment)
    except subprocess.TimeoutExpired:
        return False
    return True


def test_an_error_at_a_prompt_ends_nothing() -> None:
    if not input_ends():
        pytest.skip("this mpiexec keeps the other ranks' input open: no prompt on two ranks ends")
    typed = "1 / 0\nprint('still', float(x[0]), 'here')\n"
    done = python("-i", str(PROGRAMS / "ending.py"), typed=typed)
    assert done.returncode == 0, done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "still 0.0 here" in done.stdout
    assert done.stdout.count("at exit 1.0") == 2
