"""A user's own application, in a package outside of the tree, runs by its entry point."""

from __future__ import annotations

import os
import pathlib
import re

import numpy as np
import pytest

from launching import mpigrad

pytestmark = pytest.mark.launcher

SMALL = ("--cells", 31, "--time-steps", 3, "--descent-steps", 20)
PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "own_application"


@pytest.fixture
def installed(tmp_path: pathlib.Path) -> dict[str, str]:
    """Settings of an environment that has the package and its metadata, without an installation."""
    declared = (PACKAGE / "pyproject.toml").read_text()
    (entry,) = re.findall(r'^mine = "(.*)"$', declared, re.MULTILINE)
    folder = tmp_path / "ring_heat-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ring-heat\nVersion: 1.0\n")
    entries = {
        "mine": entry,
        "settings_only": "ring_heat.settings:Settings",
        "misspelt": "ring_heat.application:YOURS",
        "absent": "ring_cold.application:MINE",
    }
    lines = ["[mpigrad.apps]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    paths = [str(tmp_path), str(PACKAGE), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_it_runs_on_two_ranks(installed: dict[str, str], tmp_path: pathlib.Path) -> None:
    out = tmp_path / "start.npy"
    done = mpigrad("run", "mine", "-n", 2, *SMALL, "--out", out, **installed)
    assert done.returncode == 0, done.stderr
    first, last, error = map(float, re.findall(r"\d\S*\d", done.stdout))
    assert last < 1e-3 * first
    assert error < 1e-2
    angle = 2 * np.pi * np.arange(31) / 31
    np.testing.assert_allclose(np.load(out), 1 + np.sin(angle) + 0.3 * np.cos(2 * angle), atol=1e-2)


def test_help_has_its_settings_and_the_launching_options(installed: dict[str, str]) -> None:
    done = mpigrad("run", "mine", "--help", **installed)
    assert done.returncode == 0, done.stderr
    for text in ("--cells INT", "Number of time steps between", "-n RANKS"):
        assert text in done.stdout


def test_run_help_lists_it_next_to_ours(installed: dict[str, str]) -> None:
    done = mpigrad("run", "--help", **installed)
    assert done.returncode == 0, done.stderr
    assert "mpigrad run mine: the temperature of a ring" in done.stdout
    assert "mpigrad run poisson: " in done.stdout
    assert "mpigrad run settings_only: expected an mpigrad.launch.applications" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--cells", 2), "--cells: expected at least 3, got 2"),
        (("--time-steps", 0), "--time-steps: expected at least 1, got 0"),
        (("--cells", "many"), "--cells"),
        (("--n-cells", 5), "--n-cells"),
        (("-n", 0), "-n: expected at least 1 rank, got 0"),
    ],
)
def test_rejects_wrong_settings(
    installed: dict[str, str], arguments: tuple[object, ...], text: str
) -> None:
    done = mpigrad("run", "mine", *arguments, **installed)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full("four ranks; test_cli.py has an error of a run")
def test_an_error_of_the_run_is_printed_without_a_traceback(installed: dict[str, str]) -> None:
    done = mpigrad("run", "mine", "-n", 4, "--cells", 3, **installed)
    assert done.returncode != 0
    assert "--cells: expected at least one for each of 4 ranks, got 3" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("settings_only", "entry point ring_heat.settings:Settings, got type"),
        ("misspelt", "AttributeError: module 'ring_heat.application' has no attribute 'YOURS'"),
        ("absent", "ModuleNotFoundError: No module named 'ring_cold'"),
    ],
)
def test_rejects_entry_points_that_are_not_applications(
    installed: dict[str, str], name: str, text: str
) -> None:
    done = mpigrad("run", name, "-n", 2, **installed)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"mpigrad run {name}: expected an mpigrad.launch.applications")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
