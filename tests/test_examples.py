"""Every program in examples/ runs, alone and on several ranks; each asserts its own results."""

from __future__ import annotations

import pathlib
import re
import runpy

import jax
import pytest

EXAMPLES = sorted((pathlib.Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
LONG = ("lynx_hare",)  # in make test-full only


CASES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.full] if path.stem in LONG else [])
    for path in EXAMPLES
]


@pytest.mark.ranks(1, 2)
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
    """Which computes at import; here, unlike in a program, mpigrad is imported already."""
    order = re.findall(r"^(?:import|from) (mpigrad|blackjax)\b", path.read_text(), re.MULTILINE)
    assert order[0] == "mpigrad"
