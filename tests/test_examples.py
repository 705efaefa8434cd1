"""Every program in examples/ runs, alone and on several ranks; each asserts its own results."""

from __future__ import annotations

import pathlib
import runpy

import jax
import pytest

EXAMPLES = sorted((pathlib.Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
LONG = ("lynx_hare",)  # in make test-full only


def case(path: pathlib.Path) -> object:
    marks = [pytest.mark.full] if path.stem in LONG else []
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("path", map(case, EXAMPLES))
def test_example(path: pathlib.Path) -> None:
    assert path.exists()
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        jax.config.update("jax_enable_x64", True)
