"""Programs on older processors, under QEMU, and MPIGRAD_CPU."""

from __future__ import annotations

import functools
import platform
import re
import shutil
import subprocess
import sys

import pytest

from launching import PROGRAMS, mpiexec, mpigrad, outside, run
from mpigrad.launch.launcher import rank_environment
from mpigrad.launch.mpi_installation import find_launcher, mpi_library
from mpigrad.runtime.processor import VARIANTS, processor_variant

QEMU = shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.launcher,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="these are levels of x86-64"),
]
on_qemu = pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 (Debian: qemu-user) is missing")
TWO_RANKS = {name: str(PROGRAMS / name) for name in ("without_jax.py", "older_processor.py")}


def emulate(processor: str, program: str, **environment: str) -> str:
    """Run a program on two ranks of a processor, and return its output."""
    launcher = find_launcher(mpi_library())
    python = [str(QEMU), "-cpu", processor, sys.executable, TWO_RANKS[program]]
    done = subprocess.run(
        [launcher.path, "-n", "2", *python],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=outside() | rank_environment(launcher, 2) | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def here() -> str:
    """Return the output of without_jax.py on this processor."""
    done = mpiexec(2, TWO_RANKS["without_jax.py"])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(output: str) -> list[float]:
    """Return the results that the ranks have printed, sorted."""
    found = sorted(float(x) for x in re.findall(r"\d\.\d+e[+-]\d\d", output))
    assert found, output
    return found


@on_qemu
def test_the_oldest_processor() -> None:
    # jaxlib does not run here, and NumPy's BLAS needs to be told the processor.
    output = emulate("Nehalem", "without_jax.py", OPENBLAS_CORETYPE="Nehalem")
    assert output.count("x86-64, avx=False, mpigrad_waves_x86-64,") == 2, output
    assert here().count(f"{processor_variant()}, avx=True") == 2, here()
    assert numbers(output) == pytest.approx(numbers(here()), rel=1e-4)


@pytest.mark.full("JAX takes a minute under QEMU")
@on_qemu
@pytest.mark.parametrize(
    ("processor", "variant"), [("SandyBridge", "x86-64"), ("Haswell", "x86-64-v3")]
)
def test_processors_of_jaxlib(processor: str, variant: str) -> None:
    output = emulate(processor, "older_processor.py", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert output.count(f": {variant}, mpigrad_waves_{variant},") == 2, output
    native = mpigrad("launch", "-n", 2, TWO_RANKS["older_processor.py"])
    assert numbers(output) == pytest.approx(numbers(native.stdout), rel=1e-4)


@on_qemu
@pytest.mark.parametrize(
    ("variant", "error"),
    [
        ("", "mpigrad: this processor does not have AVX, which jaxlib needs. Use a processor of"),
        ("x86-64-v3", "mpigrad: MPIGRAD_CPU is x86-64-v3, but this processor runs x86-64 at most."),
    ],
)
def test_an_older_processor_is_an_error(variant: str, error: str) -> None:
    done = run(
        [str(QEMU), "-cpu", "Nehalem", sys.executable, "-c", "import mpigrad"], MPIGRAD_CPU=variant
    )
    assert f"ImportError: {error}" in done.stderr


def test_an_unknown_variant() -> None:
    done = mpigrad("launch", "-n", 2, TWO_RANKS["older_processor.py"], MPIGRAD_CPU="avx2")
    assert done.returncode == 1
    error = f"MPIGRAD_CPU must be one of {', '.join(VARIANTS)}, got 'avx2'. Set it to one of them"
    assert error in done.stderr, done.stderr  # one rank may be ended before it prints


@pytest.mark.parametrize("variant", VARIANTS[: 1 + VARIANTS.index(processor_variant())])
def test_every_variant(variant: str) -> None:
    done = mpiexec(2, TWO_RANKS["without_jax.py"], MPIGRAD_CPU=variant)
    assert done.stdout.count(f"{variant}, avx=True, mpigrad_waves_{variant},") == 2, done.stderr
    assert numbers(done.stdout) == pytest.approx(numbers(here()), rel=1e-4)
