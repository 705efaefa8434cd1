"""The examples in the docstrings of the applications run, and functions have one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pathlib
from typing import Any

import jax
import pytest

PACKAGES = ("heat", "poisson", "population", "report", "sgd")
# `run` is an application itself. The example of another name or of docs/ shows the others.
WITHOUT = {
    "inverse_problem", "load_network", "load_task", "log_density", "make_experiment",
    "predict_patient", "put_patients", "read_patients", "run", "simulate", "summarize",
}  # fmt: skip

pytestmark = [pytest.mark.ranks(1), pytest.mark.full("continuous integration runs them by itself")]


def cases() -> list[Any]:
    found = []
    for package in PACKAGES:
        module = importlib.import_module(f"mpigrad_apps.{package}")
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or callable(thing):
                found.append(pytest.param(name, thing, id=f"{package}.{name}"))
    return found


@pytest.mark.parametrize(("name", "thing"), cases())
def test_examples(
    name: str, thing: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (thing.__doc__ or "").strip(), f"{name} has no docstring"
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    jax.config.update("jax_enable_x64", False)  # as a user starts
    try:
        for test in finder.find(thing, name, module=inspect.getmodule(thing), globs={}):
            runner.run(test)
    finally:
        jax.config.update("jax_enable_x64", True)
    result = runner.summarize(verbose=False)
    assert not result.failed, name
    if not inspect.isclass(thing) and name not in WITHOUT:
        assert result.attempted, f"{name} has no example"
