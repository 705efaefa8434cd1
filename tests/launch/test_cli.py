"""The command line prints its help, and rejects invalid arguments before it launches anything."""

from __future__ import annotations

import pathlib
import signal
import sys

import pytest

from launching import PROGRAMS, command, mpigrad, run
from mpigrad.launch import cli, launcher, run_application

pytestmark = pytest.mark.launcher


def test_help_names_the_commands_without_jax() -> None:
    done = mpigrad("--help")
    assert done.returncode == 0
    for name in ("run", "launch", "doctor"):
        assert f"\n  {name} " in done.stdout
    python, *rest = command("--help")
    imported = run([python, "-X", "importtime", *rest]).stderr
    modules = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert "mpigrad.launch.launcher" in modules
    assert modules.isdisjoint({"jax", "numpy", "mpi4py.MPI"})


def test_help_of_an_application_lists_its_settings() -> None:
    done = mpigrad("run", "poisson", "--help")
    assert done.returncode == 0
    for option in ("--cells INT INT", "--iterations INT", "-n RANKS", "--timeout SECONDS"):
        assert option in done.stdout


def test_ctrl_c_before_the_ranks_start_prints_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "application_names", lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr("sys.argv", ["mpigrad", "run", "heat"])
    # A shell starts what runs in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main() == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("", "mpigrad: SIGINT: no rank was started\n")


@pytest.mark.cases("2", reason="both ranks find the error, and it is printed once")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_error_of_the_input_is_all_that_is_printed(ranks: int, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.txt"
    file.write_text("no model")
    done = mpigrad("run", "acoustic", "-n", ranks, "--model", file, "--out", tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"mpigrad: {file}: the file has an unknown format. Known formats: ")


def test_an_error_names_options() -> None:
    text = str(run_application._with_name(ValueError("x: Use resume=True or overwrite=True.")))
    assert text == "mpigrad: x: Use --resume or --overwrite."


@pytest.mark.full("two runs; test_an_error_names_options has the text")
def test_an_error_of_a_save_names_the_option(tmp_path: pathlib.Path) -> None:
    """The library says overwrite=True, which nobody can type on the command line."""
    words = ("run", "heat", "--cells", 8, 8, "--unknown", "cells", "--iterations", 2)
    assert mpigrad(*words, "--out", tmp_path / "out").returncode == 0
    done = mpigrad(*words, "--out", tmp_path / "out", "--resume", "--seed", 1)
    assert done.returncode == 1
    assert "seed is 0 in its fingerprint and 1 in this run. Use --overwrite to" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("launch", "-n", 0, PROGRAMS / "say.py"), "-n: expected at least 1 rank, got 0"),
        (("launch", "-n", -2, PROGRAMS / "say.py"), "-n: expected at least 1 rank, got -2"),
        (("launch", "-n", 1.5, PROGRAMS / "say.py"), "invalid int value"),
        (("launch", "-n", "two", PROGRAMS / "say.py"), "invalid int value"),
        (
            ("launch", "--timeout", 0, PROGRAMS / "say.py"),
            "--timeout: expected more than 0 seconds, got 0",
        ),
        (
            ("launch", "--timeout", "nan", PROGRAMS / "say.py"),
            "--timeout: expected more than 0 seconds, got nan",
        ),
        (
            ("launch", "--grace", -1, PROGRAMS / "say.py"),
            "--grace: expected 0 seconds or more, got -1",
        ),
        (("launch", "-n", 2, "missing.py"), "there is no file missing.py"),
        (("launch", "-n", 2, "-m", "missing_module"), "there is no module missing_module"),
        (("launch", "-n", 2, "-m"), "expected a module"),
        (("launch", "-n", 2), "PROGRAM.py"),
        (("launch", "--rank", 2, PROGRAMS / "say.py"), "launch: unknown option --rank"),
        (("run", "poisson", "-n", 0), "-n: expected at least 1 rank, got 0"),
        (("run", "poisson", "--cells", 1, 1), "--cells: expected at least 2 cells"),
        (("run", "poisson", "--cells", 10), "--cells"),
        (("run", "poisson", "--data", "missing.npz"), "there is no file missing.npz"),
        (("run", "poisson", "--iteration", 3), "--iterations"),
        (("run", "fwi", "--invert", "rho"), "--invert: for acoustic waves expected some of vp"),
        (("run", "fwi", "--initial", "missing.mat"), "there is no file missing.mat"),
        (("run", "acoustic", "--cells", 4, 30), "--cells: expected at least 8 along each axis"),
        (
            ("run", "acoustic", "--cells", 9, 9, 9),
            "--cells: expected two numbers, one for each axis",
        ),
        (("run", "fwi", "--cells", 9, 9, 9, 9), "--cells: expected two or three numbers, one for"),
        (("run", "population", "--data", "missing.csv"), "there is no file missing.csv"),
        (("run", "sgd", "--module", "missing.py:task"), "there is no file missing.py"),
        (("run", "sgd", "--mode", "hogwild"), "--mode"),
        (("run", "elastic", "--source", "drum"), "--source"),
        (("run", "storm"), "poisson, population, sgd), got storm"),
        (("run",), "expected the NAME of an application (acoustic, elastic"),
        (("doctor", "-n", 0), "-n: expected at least 1 rank, got 0"),
        (("trot",), "run, launch, check, doctor"),
    ],
)
def test_rejects_invalid_commands(
    arguments: tuple[object, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, because a command takes a while to start."""
    monkeypatch.setattr("sys.argv", ["mpigrad", *map(str, arguments)])
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: pytest.fail("ranks are launched"))
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_an_invalid_command_is_one_line() -> None:
    done = mpigrad("launch", "-n", 0, PROGRAMS / "say.py")
    assert done.returncode == 2
    assert done.stderr == "mpigrad: -n: expected at least 1 rank, got 0.\n"


def test_version() -> None:
    done = mpigrad("--version")
    assert done.stdout.startswith("mpigrad 0."), done.stderr


SAME_COMMAND = pytest.mark.full(
    "acoustic runs the same code of the command line; tests/applications run the others"
)
SMALL = ("--cells", 12, 12, "--pml", 2, "--steps", 10, "--shots", 1)
WAVES = ("--cells", 24, 16, "--pml", 4, "--steps", 30, "--shots", 2)
VOLUME = ("--cells", 20, 20, 14, "--pml", 5, "--steps", 120, "--shots", 4)


@pytest.mark.long("an application from its start to its report")
@pytest.mark.parametrize(
    "arguments",
    [
        ("acoustic", *SMALL, "--frames", 2),
        pytest.param(("poisson", "--cells", 12, 10, "--iterations", 3), marks=SAME_COMMAND),
        pytest.param(("heat", "--cells", 12, 10, "--frames", 3), marks=SAME_COMMAND),
        pytest.param(("elastic", *WAVES, "--frames", 2, "--groups", 2), marks=SAME_COMMAND),
        pytest.param(
            ("fwi", *WAVES, "--iterations", 2, "--unknown", "network", "--water", 20),
            marks=SAME_COMMAND,
        ),
        pytest.param(
            ("fwi", *VOLUME, "--iterations", 2, "--groups", 2, "--vtk"), marks=SAME_COMMAND
        ),
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_application_runs_on_two_ranks(tmp_path: object, arguments: tuple[object, ...]) -> None:
    done = mpigrad("run", *arguments, "-n", 2, "--timeout", 180, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout
