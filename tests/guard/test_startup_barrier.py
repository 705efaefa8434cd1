"""The job ends if a rank does not import mpigrad, or fails in the import."""

from __future__ import annotations

import pathlib
import re

import pytest

from launching import mpiexec, mpigrad, no_orphans

pytestmark = [pytest.mark.launcher, pytest.mark.waits]

VARIANT = pytest.mark.full("a job of several seconds that is a variant of another case")
PROGRAM = """
import sys
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
{lines}
import mpigrad as mg
mg.barrier()
"""


@pytest.mark.parametrize(
    ("absent", "bare"),
    [
        (2, True),
        *(pytest.param(*c, marks=VARIANT) for c in [(0, False), (0, True), (2, False)]),
    ],
)
def test_a_missing_rank_is_named(absent: int, bare: bool, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(lines=f"if rank == {absent}: sys.exit(0)"))
    with no_orphans() as mark:
        setting = {"MPIGRAD_TIMEOUT": "2", **mark}
        done = (
            mpiexec(3, program, **setting)
            if bare
            else mpigrad("launch", "-n", 3, program, **setting)
        )
    assert done.returncode != 0
    who = "rank 2" if absent else "another rank"
    text = (
        f" s in `import mpigrad`: {who} has not imported it, or has already ended. Import mpigrad"
    )
    assert done.stderr.count(text) == 1, done.stderr
    # Without rank 0, the first rank whose time is over reports, without the name of the rank.
    assert re.search(f"rank {0 if absent else '[12]'} of 3 has waited ", done.stderr), done.stderr


@pytest.mark.parametrize("bare", [False, pytest.param(True, marks=VARIANT)])
def test_a_rank_that_ends_before_mpi_has_started(bare: bool, tmp_path: pathlib.Path) -> None:
    """MPI_Init of the others never ends, and it blocks Python.

    (Open MPI itself detects a rank that ends while others are in MPI_Init.)
    """
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "rank = os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK'))\n"
        "if rank == '1': sys.exit(0)\n"
        "time.sleep(3)\n"
        "import mpigrad as mg\nmg.barrier()\n"
    )
    with no_orphans() as mark:
        setting = {"MPIGRAD_TIMEOUT": "2", **mark}
        start = mpiexec if bare else lambda *words, **s: mpigrad("launch", "-n", *words, **s)
        done = start(2, program, **setting)
    assert done.returncode != 0
    assert done.stderr.count("rank 0 has waited 5 s in MPI_Init, in `import mpigrad`: anoth") == 1


@pytest.mark.full("test_timeout_setting has the values of the setting")
def test_an_infinite_time_limit(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import mpigrad as mg\nmg.barrier()\n")
    assert mpigrad("launch", "-n", 2, program, MPIGRAD_TIMEOUT="inf").returncode == 0


def test_import_in_a_spawned_pool_ends_the_job(tmp_path: pathlib.Path) -> None:
    """The pool would start new processes without end."""
    program = tmp_path / "program.py"
    program.write_text(
        "import mpigrad as mg\nimport multiprocessing as mp\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(abs, range(4)))\n"
    )
    with no_orphans() as mark:
        done = mpigrad("launch", "-n", 2, program, **mark)
    assert done.returncode != 0
    assert "a process that multiprocessing spawned from MPI process" in done.stderr


def test_rejects_an_invalid_setting_of_the_guard(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import mpigrad")
    done = mpigrad("launch", "-n", 2, program, MPIGRAD_GUARD="true")
    assert done.returncode != 0
    assert "MPIGRAD_GUARD must be 1 (on) or 0 (off), got 'true'" in done.stderr


def test_an_error_in_the_import_ends_all_ranks(tmp_path: pathlib.Path) -> None:
    """This holds under a bare mpiexec too, which does not notice the error itself."""
    program = tmp_path / "program.py"
    lines = "import jax.numpy as jnp\nif rank == 1: print(float(jnp.ones(3).sum()))"
    program.write_text(PROGRAM.format(lines=lines))
    with no_orphans() as mark:
        done = mpiexec(2, program, **mark)
    assert done.returncode != 0
    assert done.stderr.count("expected to be imported before the first JAX computation") == 1, (
        done.stderr
    )
    assert "mpigrad: rank 1 of 2 failed; ending all ranks" in done.stderr
