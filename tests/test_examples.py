"""Every program in examples/ runs on two ranks, and in make test-full on one rank, too."""

from __future__ import annotations

import os
import pathlib
import re
import runpy

import jax
import pytest

EXAMPLES = sorted((pathlib.Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
LONG = (
    "born",
    "drum",
    "hyperelastic_block",
    "learned_law",
    "lynx_hare",
    "moving_source",
    "nonlinear_diffusion",
    "perforated_plate",
)


def marks(path: pathlib.Path) -> list[pytest.MarkDecorator]:
    counts = (1, 2) if os.environ.get("MPIGRAD_ALL_TESTS") == "1" else (2,)
    needs_torch = re.search(r"^(import|from) (mpigrad\.)?torch\b", path.read_text(), re.M)
    return [
        pytest.mark.ranks(*counts),
        *[pytest.mark.full("takes long to compile")] * (path.stem in LONG),
        *[pytest.mark.torch] * bool(needs_torch),
    ]


CASES = [pytest.param(path, id=path.stem, marks=marks(path)) for path in EXAMPLES]


@pytest.mark.parametrize("path", CASES)
def test_example(path: pathlib.Path) -> None:
    assert path.exists()
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        jax.config.update("jax_enable_x64", True)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_mpigrad_is_imported_before_blackjax(path: pathlib.Path) -> None:
    """Importing blackjax computes. Here, unlike in a program, mpigrad is imported already."""
    order = re.findall(r"^(?:import|from) (mpigrad|blackjax)\b", path.read_text(), re.MULTILINE)
    assert order[0] == "mpigrad"
