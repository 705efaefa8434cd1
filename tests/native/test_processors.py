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
from mpigrad.runtime import processor
from mpigrad.runtime.processor import (
    VARIANTS,
    built_variants,
    processor_variant,
    variant_library,
)

QEMU = shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.launcher,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="these are levels of x86-64"),
]
on_qemu = pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 (Debian: qemu-user) is missing")
BUILT = built_variants("waves")


def compiled(variant: str) -> pytest.MarkDecorator:
    """Skip a test of a variant that is not built here. A wheel has those with AVX2."""
    return pytest.mark.skipif(
        variant not in BUILT,
        reason=f"waves were compiled for {' and '.join(BUILT) or 'no processor'} here, not for "
        f'{variant}: `make test-wheel TESTS="-n 0,1 tests/native"` runs this test',
    )


TWO_RANKS = {name: str(PROGRAMS / name) for name in ("without_jax.py", "older_processor.py")}


def emulate(processor: str, **environment: str) -> str:
    """Run older_processor.py on two ranks of a processor, and return its output."""
    launcher = find_launcher(mpi_library())
    python = [str(QEMU), "-cpu", processor, sys.executable, TWO_RANKS["older_processor.py"]]
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


@pytest.mark.full("JAX takes a minute under QEMU")
@on_qemu
@compiled("x86-64-v3")
def test_an_older_processor() -> None:
    output = emulate("Haswell", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert output.count(": x86-64-v3, mpigrad_waves_x86-64-v3,") == 2, output
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
        [str(QEMU), "-cpu", "Nehalem", sys.executable, "-c", "import mpigrad; mpigrad.grad"],
        MPIGRAD_CPU=variant,
    )
    assert f"ImportError: {error}" in done.stderr


def test_an_unknown_variant() -> None:
    done = mpigrad("launch", "-n", 2, TWO_RANKS["older_processor.py"], MPIGRAD_CPU="avx2")
    assert done.returncode == 1
    error = f"MPIGRAD_CPU must be one of {', '.join(VARIANTS)}, got 'avx2'. Set it to one of them"
    assert error in done.stderr, done.stderr  # one rank may be ended before it prints


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=compiled(variant))
        for variant in VARIANTS[: 1 + VARIANTS.index(processor_variant())]
    ],
)
def test_every_variant(variant: str) -> None:
    done = mpiexec(2, TWO_RANKS["without_jax.py"], MPIGRAD_CPU=variant)
    assert done.stdout.count(f"{variant}, avx=True, mpigrad_waves_{variant},") == 2, done.stderr
    assert numbers(done.stdout) == pytest.approx(numbers(here()), rel=1e-4)


@pytest.mark.skipif("x86-64" in BUILT, reason="this installation has waves for x86-64")
def test_a_variant_that_was_not_built_is_an_error() -> None:
    done = mpigrad("launch", "-n", 2, TWO_RANKS["older_processor.py"], MPIGRAD_CPU="x86-64")
    assert done.returncode == 1
    error = f"MPIGRAD_CPU is x86-64, but this installation has waves for {' and '.join(BUILT)} only"
    assert error in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("built", "best", "chosen", "expected"),
    [
        # Wheels.
        (VARIANTS[1:], "x86-64-v4", "", "mpigrad_waves_x86-64-v4"),
        (VARIANTS[1:], "x86-64-v4", "x86-64-v3", "mpigrad_waves_x86-64-v3"),
        # Builds from source on this processor, on an older one, and on a newer one.
        (VARIANTS[2:], "x86-64-v4", "", "mpigrad_waves_x86-64-v4"),
        (VARIANTS[:1], "x86-64-v4", "", "mpigrad_waves_x86-64"),
        (VARIANTS[:2], "x86-64-v4", "", "mpigrad_waves_x86-64-v3"),
        (
            VARIANTS[2:],
            "x86-64-v3",
            "",
            "mpigrad: this processor runs x86-64-v3 at most, but this installation has waves for "
            "x86-64-v4 only. Build mpigrad on this processor, or with `MPIGRAD_VARIANTS=x86-64-v3",
        ),
        # MPIGRAD_CPU.
        (
            VARIANTS[1:],
            "x86-64-v4",
            "x86-64",
            "mpigrad: MPIGRAD_CPU is x86-64, but this installation has waves for x86-64-v3 and "
            "x86-64-v4 only. Unset it, or build that one: `MPIGRAD_VARIANTS=x86-64 make setup",
        ),
        (VARIANTS[:1], "x86-64-v4", "x86-64-v3", "mpigrad: MPIGRAD_CPU is x86-64-v3, but this"),
        # After `make demo`.
        (
            (),
            "x86-64-v4",
            "",
            "mpigrad: this installation has no native library of waves. Build it with `make setup`",
        ),
    ],
)
def test_the_variants_of_an_installation(
    built: tuple[str, ...],
    best: str,
    chosen: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MPIGRAD_CPU", chosen)
    monkeypatch.setattr(processor, "processor_variant", lambda: chosen or best)
    monkeypatch.setattr(processor, "built_variants", lambda part: built)
    if expected.startswith("mpigrad: "):
        with pytest.raises(ImportError, match=re.escape(expected)):
            variant_library("waves")
    else:
        assert variant_library("waves") == expected
