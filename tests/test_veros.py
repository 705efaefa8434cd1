"""The ocean model veros on mpigrad (docs/veros.md). `make test-veros` installs it."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from launching import PROGRAMS, outside
from xla_flags import QUICK_TO_COMPILE

EXAMPLE = PROGRAMS.parent.parent / "examples" / "veros_sensitivity" / "heat_transport.py"

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        importlib.util.find_spec("veros") is None, reason="veros is not here: make test-veros"
    ),
]


def launch(ranks: int, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mpigrad", "launch", "-n", str(ranks), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=1200,
        env=outside() | {"XLA_FLAGS": QUICK_TO_COMPILE, "MPIGRAD_TIMEOUT": "1000"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fields_equal_those_of_one_rank(tmp_path: pathlib.Path) -> None:
    """veros itself, with its own solver: 10 days of its set-up ACC."""
    for ranks in (1, 2, 4):
        launch(ranks, PROGRAMS / "veros_fields.py", tmp_path / f"{ranks}.npz")
    alone = np.load(tmp_path / "1.npz")
    for ranks in (2, 4):
        fields = np.load(tmp_path / f"{ranks}.npz")
        for name, values in alone.items():
            scale = np.abs(values).max()
            np.testing.assert_allclose(fields[name], values, rtol=1e-7, atol=1e-10 * scale)


def test_gradient_equals_that_of_one_rank(tmp_path: pathlib.Path) -> None:
    """A set-up without turbulence, which is compiled in half of the time."""
    options = ["--setup", "acc_basic", "--steps", 10, "--spin-up", 40, "--taylor", "--override"]
    options += [f"enable_{what}=false" for what in ("neutral_diffusion", "skew_diffusion", "tke")]
    options += ["kappaH_0=1e-4", "kappaM_0=1e-3"]
    for ranks in (1, 4):
        printed = launch(ranks, EXAMPLE, "--save", tmp_path / f"{ranks}.npz", *options)
        taylor = re.findall(r"^taylor (\S+) (\S+) (\S+)$", printed, re.MULTILINE)
        assert len(taylor) == 5
        remainders = np.abs([float(rest) for _, _, rest in taylor])
        np.testing.assert_allclose(remainders[:-1] / remainders[1:], 4, atol=0.2)
    one, four = (np.load(tmp_path / f"{ranks}.npz") for ranks in (1, 4))
    for name in ("temperature", "wind"):
        scale = np.abs(one[name]).max()
        assert scale > 0
        np.testing.assert_allclose(four[name], one[name], atol=1e-9 * scale, rtol=0)
