"""`mpigrad launch --as mpi4jax`, `python -m mpigrad.compat.mpi4jax`, and what they refuse."""

from __future__ import annotations

import sys

import pytest

from launching import PROGRAMS, mpiexec, mpigrad, run

pytestmark = pytest.mark.launcher
PROGRAM = PROGRAMS / "for_mpi4jax.py"
MODULE = ("-m", "mpigrad.compat.mpi4jax")


@pytest.mark.full(
    "the next test has --as, and test_internals_are_an_error_with_the_line the defaults"
)
def test_launch_as_mpi4jax() -> None:
    done = mpigrad("launch", "-n", 2, "--as", "mpi4jax", PROGRAM)
    assert done.stdout == "gradient 1.0\nmpigrad.compat.mpi4jax 0.9.1.post2: 1.0\n", done.stderr
    assert done.returncode == 0


def test_launch_as_an_older_version_with_exact_adjoints() -> None:
    words = ("--as", "mpi4jax==0.7.2", "--exact-adjoints", PROGRAM, "tokens")
    done = mpigrad("launch", "-n", 2, *words)
    assert done.stdout == "gradient 2.0\nmpigrad.compat.mpi4jax 0.7.2: 1.0\n", done.stderr


@pytest.mark.full("test_internals_are_an_error_with_the_line runs the module")
def test_module_under_the_launcher_of_mpi() -> None:
    done = mpiexec(2, *MODULE, PROGRAM)
    assert "mpigrad.compat.mpi4jax 0.9.1.post2: 1.0\n" in done.stdout, done.stderr


def test_internals_are_an_error_with_the_line() -> None:
    done = run([sys.executable, *MODULE, str(PROGRAM), "internals"])
    assert done.returncode == 1
    assert done.stdout == "gradient 1.0\nmpigrad.compat.mpi4jax 0.9.1.post2: 0.0\n"
    assert "mpi4jax._src: the internals of mpi4jax do not exist in mpigrad" in done.stderr
    assert f'{PROGRAM}", line ' in done.stderr


def test_scripts_keep_the_options() -> None:
    words = ("--as", "mpi4jax==0.7.2", "--exact-adjoints")
    done = mpigrad("launch", "-n", 2, *words, "--print-script", "slurm", PROGRAM)
    assert f"launch {' '.join(words)} {PROGRAM}" in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--as", "mpi4py"), "launch --as: expected mpi4jax or mpi4jax==VERSION, got mpi4py."),
        (("--as", "mpi4jax=="), "expected mpi4jax or mpi4jax==VERSION, got mpi4jax==."),
        (("--as", "mpi4jax==new"), "expected mpi4jax or mpi4jax==VERSION, got mpi4jax==new."),
        (("--exact-adjoints",), "launch --exact-adjoints: this option needs --as mpi4jax."),
    ],
)
def test_launch_refuses(words: tuple[str, ...], text: str) -> None:
    done = mpigrad("launch", *words, PROGRAM)
    assert done.returncode == 2
    assert text in done.stderr


@pytest.mark.cases("-m", reason="without a program there is the same error")
@pytest.mark.parametrize("words", [(), ("-m",), ("--help",)], ids=["", "-m", "--help"])
def test_module_needs_a_program(words: tuple[str, ...]) -> None:
    done = run([sys.executable, *MODULE, *words])
    assert done.returncode == 1
    assert "mpi4jax: expected a program. Write: python -m mpigrad.compat.mpi4jax" in done.stderr
