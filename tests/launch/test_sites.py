"""Programs of one rank start everywhere, and `import mpigrad` alone starts no MPI."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from launching import mpigrad
from sites import SITES, Site, start, start_and_use

pytestmark = pytest.mark.launcher


@pytest.mark.cases("0", "2", "4", "9", reason="Open MPI 4 ends the process in two of them")
@pytest.mark.parametrize("site", range(len(SITES)))
def test_the_gradient_of_a_message_is_right(site: int) -> None:
    works, text = start_and_use(SITES[site])
    assert works, (SITES[site].name, text)
    assert ("one rank" in text) == ("no MPI" in SITES[site].name)


def test_an_mpi_that_ends_the_process_is_replaced(tmp_path: pathlib.Path) -> None:
    """As Cray's on a login node. It is tried in another process."""
    library = tmp_path / "libmpi_init.so"
    source = tmp_path / "init.c"
    source.write_text(
        "#include <stdlib.h>\n"
        "int MPI_Init_thread(int *n, char ***words, int wanted, int *level) { exit(255); }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    # Only the trial has this MPI_Init_thread: the one of this process would end it, too.
    trial = tmp_path / "python"
    trial.write_text(f'#!/bin/sh\nLD_PRELOAD={library} exec {sys.executable} "$@"\n')
    trial.chmod(0o755)
    program = f"import sys; sys.executable = {str(trial)!r}\n"
    program += "import mpigrad as mg; mg.default_communicator()\n"
    program += "from mpi4py import MPI; print(MPI.Get_library_version())"
    environment = os.environ | {"CRAY_MPICH_VERSION": "8.1.29"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "mpigrad's MPI of one rank\n", done.stderr


def test_one_rank_is_launched_without_mpi(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import mpigrad as mg\nprint(mg.default_communicator())\n")
    done = mpigrad("launch", "-n", 1, program, MPI4PY_LIBMPI="/nonexistent")
    assert done.stdout == "Communicator(rank=0, size=1)\n", done.stderr


def test_a_program_may_load_mpi_first() -> None:
    """Then the import of mpigrad starts it as a rank, whatever the launcher."""
    site = Site("mpi4py first", {})
    code = "from mpi4py import MPI; import mpigrad, sys; print('jax' in sys.modules)"
    assert start(site, code) == "True"
