"""The options of wave runs: which case has which of them.

The checks of the models and the tables in docs/acoustic.md are made from the tables here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import jax

from mpigrad.waves.history import history_of

__all__ = ["AXES", "MEMORIES", "PROGRAMS", "check_options", "is_native", "runs_native"]

_BYTES, _PRECISION, _FILES = "memory=bytes", "History(precision=...)", "History(directory=...)"
_STEPS, _ALL, _BOUNDARY = "checkpoints=k", 'checkpoints="all"', 'checkpoints="boundary"'

# The numbers of axes on which a program has an option. With an option that only JAX programs
# have, the run is a JAX program.
PROGRAMS = (("Acoustic", "native"), ("Acoustic", "xla"), ("Elastic", "native"), ("Elastic", "xla"))
AXES: dict[str, tuple[tuple[int, ...], ...]] = {
    "order=8": ((3,), (3,), (), ()),
    "density": ((), (2, 3), (2, 3), (2, 3)),
    "free_surface": ((), (), (), (2, 3)),
    "relaxation": ((), (), (), (2, 3)),
    _ALL: ((2, 3), (2, 3), (2, 3), (2, 3)),
    _STEPS: ((2, 3), (), (2, 3), (2, 3)),
    _BOUNDARY: ((2, 3), (), (2,), ()),
    _BYTES: ((2, 3), (), (2, 3), ()),
    _PRECISION: ((2, 3), (), (2, 3), ()),
    _FILES: ((2, 3), (), (2, 3), ()),
    "threads": ((2, 3), (), (2, 3), ()),
}

# The forms of `memory` that each choice of `checkpoints` has.
MEMORIES = {
    "checkpoints=None": (_BYTES, _PRECISION, _FILES),
    _STEPS: (_PRECISION, _FILES),
    _ALL: (_PRECISION, _FILES),
    _BOUNDARY: (_BYTES,),
}

_WORDS = {"native": "the native kernels", "xla": "a JAX program"}


def is_native(method: str | None) -> bool:
    """Return whether a method, None for the default, stands for the native kernels.

    They compute on CPUs.
    """
    default = "native" if jax.default_backend() == "cpu" else "xla"
    return (method or default) == "native"


def runs_native(model: Any, *, density: bool = False) -> bool:
    """Return whether a run of an `Acoustic` or `Elastic` uses the native kernels.

    Parameters
    ----------
    density
        Whether `propagate` of an `Acoustic` gets a density.
    """
    return _program(model, dict(_given(model, density)))[0] == "native"


def check_options(name: str, model: Any, *, density: bool = False) -> None:
    """Raise a ValueError of `name` if the run of a model lacks an option that is given.

    Parameters
    ----------
    model
        An `Acoustic` or `Elastic`, each of whose options is valid by itself.
    density
        Whether `propagate` of an `Acoustic` gets a density.
    """
    given = dict(_given(model, density))
    program, reason = _program(model, given)
    physics, axes = type(model).__name__, model.grid.ndim
    for option, text in given.items():
        if axes in _axes(option, physics, program):
            continue
        there = [
            f"{_WORDS[other]} on {' or '.join(map(str, at))} axes"
            for (kind, other), at in zip(PROGRAMS, AXES[option], strict=True)
            if kind == physics and at
        ]
        raise ValueError(
            f"{name}: {text} is not an option of {_WORDS[program]} on {axes} axes (chosen by "
            f"{reason}). Leave {text.partition('=')[0]} out. {physics} has it in "
            f"{' and in '.join(there)}."
        )
    checkpoints = next((option for option in given if option in MEMORIES), "checkpoints=None")
    for option in (_BYTES, _PRECISION, _FILES):
        if option in given and option not in MEMORIES[checkpoints]:
            raise ValueError(
                f"{name}: {given[option]} has no effect with {given[checkpoints]}. Leave one of "
                "both out."
            )


def _axes(option: str, physics: str, program: str) -> tuple[int, ...]:
    return AXES[option][PROGRAMS.index((physics, program))]


def _program(model: Any, given: dict[str, str]) -> tuple[Literal["native", "xla"], str]:
    """Return the program that runs a model with these options, and the reason."""
    if model.method is not None:
        return model.method, f'method="{model.method}"'
    physics = type(model).__name__
    for option, text in given.items():
        if _axes(option, physics, "xla") and not _axes(option, physics, "native"):
            return "xla", text
    return "native" if is_native(None) else "xla", f"JAX's backend, {jax.default_backend()}"


def _given(model: Any, density: bool) -> Iterator[tuple[str, str]]:
    """Yield the options of a model that are not defaults, and their texts in errors."""
    if getattr(model, "order", None) == 8:
        yield "order=8", "order=8"
    if density:
        yield "density", "density"
    if getattr(model, "free_surface", None) is not None:
        yield "free_surface", f"free_surface={model.free_surface!r}"
    if getattr(model, "relaxation", None) is not None:
        yield "relaxation", "relaxation"
    checkpoints, memory = model.checkpoints, model.memory
    if checkpoints is not None:
        option = {"all": _ALL, "boundary": _BOUNDARY}.get(checkpoints, _STEPS)
        yield option, option if option != _STEPS else f"checkpoints={checkpoints}"
    history = history_of(memory)
    for option, value in (
        (_BYTES, history.memory), (_PRECISION, history.precision), (_FILES, history.directory)
    ):  # fmt: skip
        if value is not None:
            yield option, f"memory={memory}"
    if model.threads is not None:
        yield "threads", f"threads={model.threads}"
