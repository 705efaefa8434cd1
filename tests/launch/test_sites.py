"""Programs of one rank start everywhere, and `import mpigrad` alone starts no MPI."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

from launching import PROGRAMS, mpigrad, run
from mpigrad._version import __version__ as mpigrad_version
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


def test_another_system_is_an_error() -> None:
    program = "import sys; sys.platform = 'darwin'; import mpigrad; mpigrad.grad"
    done = run([sys.executable, "-c", program])
    assert "ImportError: mpigrad: expected Linux, got darwin." in done.stderr
    command = "from mpigrad.launch.cli import main; sys.argv = ['mpigrad', 'doctor']; main()"
    done = run([sys.executable, "-c", f"import sys; sys.platform = 'darwin'; {command}"])
    assert done.stderr.startswith("mpigrad: expected Linux, got darwin."), done.stderr


def test_recipes_need_what_the_package_needs() -> None:
    root = PROGRAMS.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    conda = (root / "packaging/conda/recipe.yaml").read_text()
    spack = (root / "packaging/spack/spack_repo/mpigrad/packages/py_mpigrad/package.py").read_text()
    assert f'version: "{mpigrad_version}"' in conda
    build, run_time = project["build-system"]["requires"], project["project"]["dependencies"]
    for section, requirements in (("host", build), ("run", run_time)):
        listed = conda.partition(f"\n  {section}:\n")[2].partition("\n\n")[0].partition(":\n")[0]
        for requirement in requirements:
            name, version = requirement.split(">=")
            assert f"- {name} >={version}\n" in f"{listed}\n", section
            assert f'"py-{name}@{version}:"' in spack
    assert "python@3.11:" in spack and project["project"]["requires-python"] == ">=3.11"


def test_a_program_may_load_mpi_first() -> None:
    """Then the import of mpigrad starts it as a rank, whatever the launcher."""
    site = Site("mpi4py first", {})
    code = "from mpi4py import MPI; import mpigrad, sys; print('jax' in sys.modules)"
    assert start(site, code) == "True"


ORDERS = (
    "from mpigrad.grid import Grid; Grid((4,), (1.0,))",
    "import mpigrad; from mpi4py import MPI; from mpigrad.sparse import Matrix",
    "import mpigrad.waves",
    "from mpigrad.compat import mpi4jax",
)


@pytest.mark.cases("0", "1", reason="the others are imports of the same kind")
@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_each_order_of_imports_starts_the_rank(order: int) -> None:
    code = "; import threading; print(*[t.name for t in threading.enumerate()])"
    assert "mpigrad-watch" in start(SITES[0], ORDERS[order] + code)


@pytest.mark.full("the sites above have these variables")
def test_children_of_a_rank_without_a_launcher(tmp_path: pathlib.Path) -> None:
    """A pool of processes with the variables of a launcher that is gone."""
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, mpigrad as mg\n"
        "def size(_): return mg.default_communicator().size\n"
        "if __name__ == '__main__':\n"
        "    mg.default_communicator()\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(size, [0, 0]))\n"
    )
    variables = SITES[4].variables
    done = run([sys.executable, str(program)], **variables)
    assert done.stdout == "[1, 1]\n", done.stderr


def test_a_program_without_a_launcher_starts_a_job(tmp_path: pathlib.Path) -> None:
    """What MPI has set for its single rank does not reach the ranks."""
    child = tmp_path / "child.py"
    child.write_text(
        "import mpigrad as mg, os\nprint(f'{mg.default_communicator().size} ', end='')\n"
    )
    program = "import mpigrad as mg, subprocess, sys; mg.default_communicator()\n"
    words = ["-m", "mpigrad", "launch", "-n", "2", str(child)]
    program += f"sys.exit(subprocess.run([sys.executable, *{words!r}]).returncode)"
    done = run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (0, "2 2 "), done.stderr
