"""The options of wave runs, which case has which of them, and what is stored for gradients."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Literal

import jax

__all__ = [
    "AXES",
    "MEMORIES",
    "PROGRAMS",
    "Checkpoints",
    "History",
    "Memory",
    "check_checkpoints",
    "check_options",
    "checkpoint_code",
    "history_of",
    "is_native",
    "runs_native",
]

# ---- The part of a forward run that is stored for its gradient ----


Checkpoints = int | Literal["all", "boundary"] | None

_CODES = {None: 0, "all": -1, "boundary": -2}  # as in native/waves/tile.h


def check_checkpoints(checkpoints: object, name: str) -> None:
    """Raise a ValueError of the model `name` if these are not checkpoints."""
    counted = isinstance(checkpoints, int) and not isinstance(checkpoints, bool) and checkpoints > 0
    if not (counted or checkpoints in (None, "all", "boundary")):
        raise ValueError(
            f'{name}: checkpoints must be a positive number of steps, "all", "boundary" or None, '
            f"got {checkpoints!r}."
        )


def checkpoint_code(checkpoints: Checkpoints) -> int:
    """Return the code of the native library for these checkpoints."""
    return checkpoints if isinstance(checkpoints, int) else _CODES[checkpoints]


# ---- How waves store the history of a run for its gradient ----


_PRECISIONS = {None: 0, "bfloat16": 1, "float16": 2}  # Precision in native/waves/packing.h


@dataclasses.dataclass(frozen=True)
class History:
    """How the native kernels store the history of a run: the `memory` of a model.

    Parameters
    ----------
    memory
        Largest number of bytes that each rank stores of forward runs for their gradients. Default:
        half of the free memory of its host, divided by the number of ranks there. With a
        `directory` it must be left out.
    precision
        The precision of stored histories of steps. None: that of the run. "bfloat16": 8 bits of
        each value, and the range of float32. "float16": 11 bits of each value, and one scale for
        256 values. Both take 2 bytes a value. The gradient is then not exact: docs/acoustic.md has
        measured errors. Stored states are never converted.
    directory
        Directory for files of histories, or of states with `checkpoints=k`. Use a fast disk of the
        rank's host. A rank's file exists without a name, so nothing is left in the directory
        however the run ends. The space of a run is reserved before its first step, and each item
        has a checksum. The file stays open until another run is stored, or the process ends.

    Raises
    ------
    ValueError
        If a parameter is not valid.

    Notes
    -----
    Errors of files are RuntimeErrors of the run on all ranks. Before the first step: if the
    directory cannot be written, or has not enough space. During the run, or the gradient: if a
    file cannot be written or read, or an item was damaged.

    Examples
    --------
    >>> from mpigrad.grid import Grid
    >>> from mpigrad.waves import Acoustic, History
    >>> grid = Grid((40, 30), (10.0, 10.0))
    >>> model = Acoustic(grid, dt=2e-3, steps=80, memory=History(precision="float16"))
    >>> model.memory.precision
    'float16'
    >>> History(directory="/scratch").directory
    '/scratch'
    """

    memory: int | None = None
    precision: Literal["bfloat16", "float16"] | None = None
    directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.precision not in _PRECISIONS:
            raise ValueError(
                f'History: precision must be "bfloat16", "float16" or None, got {self.precision!r}.'
            )
        if self.memory is not None and self.memory < 0:
            raise ValueError(f"History: memory must be at least 0 bytes, got {self.memory}.")
        if self.directory is not None:
            if self.memory is not None:
                raise ValueError(
                    f"History: memory={self.memory} limits histories in memory, but with a "
                    "directory they are in files. Give one of both."
                )
            object.__setattr__(self, "directory", os.path.abspath(self.directory))

    @property
    def code(self) -> int:
        """The code of the precision in the native library."""
        return _PRECISIONS[self.precision]


Memory = int | History | None


def history_of(memory: Memory) -> History:
    """Return the history that a model's `memory` stands for."""
    return memory if isinstance(memory, History) else History(memory)


# ---- The options of wave runs: which case has which of them ----
#
# The checks of the models and the tables in docs/acoustic.md are made from the tables here.


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


def is_native(backend: str | None) -> bool:
    """Return whether a backend, None for the default, stands for the native kernels.

    They compute on CPUs.
    """
    default = "native" if jax.default_backend() == "cpu" else "xla"
    return (backend or default) == "native"


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
    if model.backend is not None:
        return model.backend, f'backend="{model.backend}"'
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
