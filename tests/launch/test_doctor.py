"""`mpigrad doctor` accepts this installation, and reports the problems of others."""

from __future__ import annotations

import pathlib
import re

import pytest

from launching import mpigrad
from mpigrad.launch import doctor, launcher
from mpigrad.launch.mpi_installation import Library, mpi_library
from mpigrad.runtime import processor
from mpigrad.runtime.processor import ANY_MPI, hypre_built_with, native_path

pytestmark = pytest.mark.launcher


@pytest.mark.long("it starts the self-test, and loads each library in a process of its own")
@pytest.mark.parametrize(
    "ranks", [2, pytest.param(5, marks=pytest.mark.full("2 ranks run the same checks"))]
)
def test_this_installation_works(ranks: int) -> None:
    done = mpigrad("doctor", "-n", ranks)
    assert f"self-test on {ranks} ranks" in done.stdout, done.stderr
    assert done.stdout.count(" ok") == 6, done.stdout + done.stderr
    assert re.search(r"32 KiB to 4 MiB +ok \(through (MPI|shared memory: )", done.stdout)
    assert "(nothing is refused)" in done.stdout
    assert mpi_library().version in done.stdout
    # If hypre was built for another MPI, this is the one problem to be found.
    other = "problem: hypre is built with" in done.stdout
    assert ("1 problem found" if other else "no problem found") in done.stdout
    assert done.returncode == other


def test_more_ranks_than_cores_is_a_note() -> None:
    (finding,) = doctor._cores(launcher.cores() + 1)
    assert finding.note and "take turns" in finding.text
    assert doctor._cores(launcher.cores()) == []


def test_a_wrong_processor_is_a_problem() -> None:
    done = mpigrad("doctor", MPIGRAD_CPU="avx2")
    assert done.returncode == 1
    assert "problem: MPIGRAD_CPU must be one of" in done.stdout
    assert "self-test" not in done.stdout


def test_a_processor_without_avx_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processor, "has_avx", lambda: False)
    (finding,) = doctor._processor()
    assert finding.stops_all and "This processor does not have AVX, which" in finding.text
    assert finding.remedy.startswith("Use a processor of 2011 or later.")
    assert (
        f"processor {processor.processor_variant()} (waves, sums, digests)"
        in capsys.readouterr().out
    )


def test_missing_waves_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processor, "built_variants", lambda part: ())
    (finding,) = doctor._processor()
    assert finding.text == "This installation has no native library of waves."
    assert finding.remedy.startswith("Build it with `make setup`")
    assert not finding.stops_all
    assert "waves: none" in capsys.readouterr().out


def test_no_mpi_is_a_problem_with_a_remedy(tmp_path: pathlib.Path) -> None:
    done = mpigrad("doctor", MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "problem: mpi4py cannot load an MPI library" in done.stdout
    assert "apt-get install openmpi-bin" in done.stdout
    assert "Traceback" not in done.stderr


def test_no_launcher_is_a_problem(tmp_path: pathlib.Path) -> None:
    done = mpigrad("doctor", MPIGRAD_MPIEXEC=str(tmp_path / "mpiexec"))
    assert done.returncode == 1
    assert "there is no such program" in done.stdout
    assert "self-test" not in done.stdout


def test_a_self_test_that_cannot_end_is_a_problem() -> None:
    done = mpigrad("doctor", "--timeout", 0.5)
    assert done.returncode == 1
    assert "The self-test ended with exit code 124" in done.stdout


def test_hypre_of_another_mpi_is_a_problem(tmp_path: pathlib.Path) -> None:
    other = tmp_path / "libmpi.so.40"
    other.touch()
    findings = doctor._native(Library("Open MPI v5.0.11", str(other), "4.1", None))
    if (module := native_path("mpigrad_hypre")) and hypre_built_with(module) == ANY_MPI:
        assert findings == []
        return
    if any("without it" in f.text or "not on this machine" in f.text for f in findings):
        pytest.skip("mpigrad is built without hypre here")
    assert [f.note for f in findings] == [False]
    assert f"but mpi4py runs on {other}" in findings[0].text


@pytest.mark.parametrize(
    ("version", "supported", "expected"),
    [
        ("0.10.2", ">=0.10,<0.11", True),
        ("0.11.0", ">=0.10,<0.11", False),
        ("0.9.2", ">=0.10,<0.11", False),
        ("0.10.0", "<0.11,>=0.10", True),
        ("0.10.2", "==0.10.2", True),
        ("0.10.2", "", True),
    ],
)
def test_supported_ranges(version: str, supported: str, expected: bool) -> None:
    assert doctor.within(version, supported) is expected
