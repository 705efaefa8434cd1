"""Every public name has a docstring with an example, and all examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pathlib
from typing import Any

import jax
import pytest

PACKAGES = (
    "",
    ".checkpoint",
    ".fem",
    ".grid",
    ".io",
    ".jobs",
    ".loops",
    ".optimize",
    ".sparse",
    ".training",
)
PACKAGES = tuple(f"mpigrad{name}" for name in (*PACKAGES, ".waves", ".torch", ".compat.mpi4jax"))
# Public names whose docstrings need no example: they are results, states and records that other
# functions make, or their example is that of the class they belong to.
WITHOUT = {
    "Decision", "Failure", "JobError", "Method", "NotFiniteError", "Point", "Record", "Reduction",
    "Request", "Snapshot", "State", "StepError",
}  # fmt: skip

pytestmark = pytest.mark.ranks(1)


_COMPILES = "the example compiles for long; the name is tested in "
# Public names whose examples only make test-full runs, and the tests that run these names.
LATER = {
    "mpigrad.fem.Energy": "tests/fem/test_laws.py",
    "mpigrad.fem.Equation": "tests/fem/test_fem_equations.py",
    "mpigrad.fem.newmark_step": "tests/fem/test_stepping.py",
    "mpigrad.fem.solve": "tests/fem/test_fem_derivatives.py",
    "mpigrad.fem.start_motion": "tests/fem/test_stepping.py",
    "mpigrad.fem.theta_step": "tests/fem/test_stepping.py",
    "mpigrad.optimize.LBFGSB": "tests/optimize/test_lbfgsb.py",
    "mpigrad.sparse.BiCGStab": "tests/sparse/solvers/test_krylov.py",
    "mpigrad.sparse.GMRES": "tests/sparse/solvers/test_nonsymmetric.py",
    "mpigrad.sparse.Guesses": "tests/sparse/solvers/test_guesses.py",
    "mpigrad.sparse.NullSpace": "tests/sparse/solvers/test_nullspace.py",
    "mpigrad.sparse.Operator": "tests/sparse/solvers/test_operator_solve.py",
    "mpigrad.sparse.newton": "tests/sparse/nonlinear/test_newton.py",
    "mpigrad.sparse.pass_guesses": "tests/sparse/solvers/test_guesses.py",
    "mpigrad.waves.Acoustic": "tests/waves/acoustic",
    "mpigrad.waves.Elastic": "tests/waves/elastic",
}


def public(package: str) -> dict[str, Any]:
    """The functions and classes that a package exports, by their qualified names."""
    module = importlib.import_module(package)
    things = {name: getattr(module, name) for name in module.__all__ if name != "torch"}
    return {
        f"{package}.{name}": thing
        for name, thing in things.items()
        if inspect.isclass(thing) or callable(thing)
    }


def cases() -> list[Any]:
    found: dict[int, Any] = {}
    for package in PACKAGES:
        if package == "mpigrad.torch":
            continue
        for name, thing in public(package).items():
            later = [pytest.mark.full(_COMPILES + LATER[name])] if name in LATER else []
            found.setdefault(id(thing), pytest.param(name, thing, id=name, marks=later))
    return list(found.values())


def run(name: str, thing: Any) -> int:
    """Run the examples of a docstring and of the methods; returns how many there are."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    module = inspect.getmodule(thing)
    for test in finder.find(thing, name, module=module, globs={}):
        runner.run(test)
    result = runner.summarize(verbose=False)
    assert not result.failed, name
    return result.attempted


def test_public_names_have_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name, thing in (case.values for case in cases()):
        assert (thing.__doc__ or "").strip(), f"{name} has no docstring"
        found = finder.find(thing, name, module=inspect.getmodule(thing), globs={})
        if name.rpartition(".")[2] not in WITHOUT:
            assert any(test.examples for test in found), f"{name} has no Examples block"


# Objects that other functions make, whose arguments are those of the library.
MADE = {"Mesh", "Data", "Pool", "LinearSystem", "Request", "Trainer", "start"}


def test_comm_is_the_last_argument_by_position_or_a_keyword() -> None:
    """As in mpi4py. Settings after it are keywords."""
    wrong = []
    for name, thing in (case.values for case in cases()):
        if name.rpartition(".")[2] in MADE:
            continue
        methods = (
            [m for m in vars(thing).values() if isinstance(m, classmethod)]
            if (inspect.isclass(thing))
            else []
        )
        for f in (thing, *(m.__func__ for m in methods)):
            try:
                parameters = list(inspect.signature(f).parameters.values())
            except ValueError:
                continue
            by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            if "comm" in by_position[:-1]:
                wrong.append(f"{name}: {by_position}")
    assert not wrong


@pytest.mark.parametrize(("name", "thing"), cases())
def test_examples_of_public_names(
    name: str, thing: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_enable_x64", False)  # as a user starts
    try:
        run(name, thing)
    finally:
        jax.config.update("jax_enable_x64", True)


@pytest.mark.torch
def test_examples_of_torch() -> None:
    jax.config.update("jax_enable_x64", False)  # as a user starts
    try:
        for name, thing in public("mpigrad.torch").items():
            run(name, thing)
    finally:
        jax.config.update("jax_enable_x64", True)
