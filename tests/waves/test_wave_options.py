"""The options that each case of waves has: in the table, in the checks, and in the docs."""

from __future__ import annotations

import inspect
import itertools
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.waves import (
    Acoustic,
    AcousticMedium,
    Elastic,
    ElasticMedium,
    Storage,
    Survey,
    fit_relaxation,
)
from mpigrad.waves.options import AXES, PROGRAMS, runs_native

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "acoustic.md"
SETTINGS: dict[str, dict[str, Any]] = {
    "free_surface": {"free_surface": "y0"},
    "relaxation": {"relaxation": fit_relaxation(30.0, (3.0, 40.0), 1)},
    'Storage("all")': {"storage": Storage("all")},
    "Storage(k)": {"storage": Storage(3)},
    'Storage("boundary")': {"storage": Storage("boundary")},
    "Storage(memory=...)": {"storage": Storage(memory=1000)},
    "Storage(precision=...)": {"storage": Storage(precision="float16")},
    "Storage(directory=...)": {"storage": Storage(directory="scratch")},
    "threads": {"threads": 2},
}
# The parameters of a Storage that its `keep` leaves a meaning.
MEANT = {
    None: {"memory", "precision", "directory"},
    3: {"precision", "directory"},
    "all": {"precision", "directory"},
    "boundary": {"memory"},
}

pytestmark = pytest.mark.ranks(1)


def model(comm: Communicator, kind: str, axes: int, **settings: Any) -> Any:
    grid = Grid((12,) * axes, (10.0,) * axes, comm)
    if kind == "Acoustic":
        return Acoustic(grid, 1e-3, 4, **{"pml": 2, **settings})
    return Elastic(grid, 1e-3, 4, 15.0, **{"pml": 2, **settings})


def refusal(make: Any) -> str:
    """Return the text of the error, empty without one."""
    try:
        make()
    except ValueError as error:
        return str(error)
    return ""


def cases() -> Any:
    for (option, columns), axes in itertools.product(AXES.items(), (2, 3)):
        for (kind, program), there in zip(PROGRAMS, columns, strict=True):
            # Only Elastic has this argument, and needs a density.
            if kind == "Elastic" or option != "relaxation":
                yield option, axes, kind, program, axes in there


def test_every_case_has_the_options_of_the_table(comm: Communicator) -> None:
    for option, axes, kind, program, known in cases():
        if option == "density":
            continue
        settings = {"backend": program, **SETTINGS[option]}
        text = refusal(lambda k=kind, a=axes, s=settings: model(comm, k, a, **s))
        assert (text == "") == known, (option, axes, kind, program, text)
        if text:
            name = next(iter(SETTINGS[option]))
            assert text.startswith(f"{kind}: {name}"), text
            assert f'(chosen by backend="{program}"). Leave {name} out. {kind} has it in ' in text
    given: dict[str, Any] = {"memory": 9, "precision": "float16", "directory": "scratch"}
    for keep, meant in MEANT.items():
        for name, value in given.items():
            text = refusal(lambda k=keep, n=name, v=value: Storage(k, **{n: v}))
            assert (text == "") == (name in meant), (keep, name, text)
            if text:
                assert f"has no effect with keep={keep!r}. Leave one of both out." in text


def test_kernels_are_the_default_on_cpus(comm: Communicator) -> None:
    for kind, axes in itertools.product(("Acoustic", "Elastic"), (2, 3)):
        assert runs_native(model(comm, kind, axes))
        assert not runs_native(model(comm, kind, axes, backend="xla"))


@pytest.mark.parametrize("kind", ["Acoustic", "Elastic"])
def test_a_free_surface_has_no_layer(comm: Communicator, kind: str) -> None:
    plain = model(comm, kind, 3, free_surface="z0")
    assert plain.pml == ((2, 2), (2, 2), (0, 2))
    assert model(comm, kind, 3, free_surface="z0", pml=plain.pml) == plain
    with pytest.raises(ValueError, match=f"{kind}: the free surface is side 0 of axis 2, but pml"):
        model(comm, kind, 3, free_surface="z0", pml=((2, 2),) * 3)
    with pytest.raises(ValueError, match=rf"{kind}: free_surface must be one of \('x0', 'x1', "):
        model(comm, kind, 2, free_surface="z0")


def markdown(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines)
        .replace("| --- ", "|---")
        .replace("|  |", "| |")
    )


def test_the_page_has_the_tables() -> None:
    words = {(2, 3): "yes", (2,): "2 axes", (3,): "3 axes", (): "error"}
    heads = [f"`{kind}`, {'native' if p == 'native' else 'JAX program'}" for kind, p in PROGRAMS]
    rows = [(f"`{option}`", *(words[axes] for axes in there)) for option, there in AXES.items()]
    assert markdown(("", *heads), rows) in PAGE.read_text(), markdown(("", *heads), rows)
    names = ("memory", "precision", "directory")
    keeps = {None: "keep=None", 3: "keep=k", "all": 'keep="all"', "boundary": 'keep="boundary"'}
    rows = [
        (f"`{keeps[keep]}`", *("yes" if name in meant else "error" for name in names))
        for keep, meant in MEANT.items()
    ]
    heads = [f"`{name}=`" for name in names]
    assert markdown(("", *heads), rows) in PAGE.read_text(), markdown(("", *heads), rows)


@pytest.mark.ranks(1, 2, 3, 4)
def test_wrong_media_are_an_error_on_all_ranks(comm: Communicator) -> None:
    """One rank alone has them. (Types are checked in tests, so the annotations are taken away.)"""
    last = comm.rank == comm.size - 1
    acoustic, elastic = model(comm, "Acoustic", 2), model(comm, "Elastic", 2)
    tile = np.full(acoustic.grid.local_shape, 2000.0)
    point, wavelets = Survey(np.full((1, 1, 2), 55.0), np.full((1, 1, 2), 55.0)), np.ones((1, 1, 4))
    propagate = inspect.unwrap(Acoustic.propagate)
    for wrong in (None, (tile, tile), {"velocity": tile}, AcousticMedium(None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"Acoustic\.propagate: the medium must be a velocity"):
            propagate(acoustic, wrong if last else tile, wavelets, point)
    good = ElasticMedium(*map(jnp.asarray, (4e9 * tile / tile, 2e9 * tile / tile, tile)))
    propagate = inspect.unwrap(Elastic.propagate)
    with pytest.raises(TypeError, match=r"Elastic\.propagate: the medium must be an ElasticMedium"):
        propagate(elastic, tuple(good) if last else good, wavelets, point)
    with pytest.raises(TypeError, match="lam, mu and rho of the medium must be arrays, got None"):
        propagate(elastic, good._replace(lam=None) if last else good, wavelets, point)


@pytest.mark.ranks(2)
def test_media_and_backends_that_differ_between_ranks(comm: Communicator) -> None:
    lossy = model(comm, "Elastic", 2, relaxation=fit_relaxation(30.0, (3.0, 40.0), 1))
    tile = jnp.full(lossy.grid.local_shape, 2000.0)
    point, wavelets = Survey(np.full((1, 1, 2), 55.0), np.full((1, 1, 2), 55.0)), np.ones((1, 1, 4))
    medium = ElasticMedium.from_velocities(tile, tile / 2, tile, *[None, tile][: comm.rank + 1])
    with pytest.raises(ValueError, match="quality factors of the medium must be the same on all"):
        lossy.propagate(medium, wavelets, point)
    either = model(comm, "Acoustic", 2, backend=("native", "xla")[comm.rank])
    with pytest.raises(ValueError, match=r"Acoustic\.propagate: backend must be the same on all"):
        either.propagate(tile, wavelets, point)


def test_bytes_of_a_storage_are_integers() -> None:
    for memory in (1e9, "1GB", True, -1):
        text = refusal(lambda m=memory: inspect.unwrap(Storage.__init__)(Storage(), memory=m))
        assert "memory must be an integer of at least 0 bytes" in text, (memory, text)
    made = object.__new__(Storage)
    inspect.unwrap(Storage.__init__)(made, np.int64(3))
    assert made == Storage(3)
