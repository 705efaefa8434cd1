"""The options of wave runs, which case has which of them, and what is stored for gradients."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np

__all__ = ["AXES", "PROGRAMS", "Storage", "check_options", "is_native", "runs_native"]

# ---- What waves store of a forward run for its gradient, and how ----


_CODES = {None: 0, "all": -1, "boundary": -2}  # as in native/waves/tile.h
_PRECISIONS = {None: 0, "bfloat16": 1, "float16": 2}  # Precision in native/waves/packing.h


@dataclasses.dataclass(frozen=True)
class Storage:
    """The storage of a run for its gradient, in an `Acoustic` or `Elastic`.

    Parameters
    ----------
    keep
        "all": all fields of all steps. k: one state every k steps. "boundary": the layers, and the
        cells next to them, of every step. The waves inside are then run backwards, which gives the
        same values up to rounding. None: in the native kernels as much as fits into `memory`. A JAX
        program stores all fields, or on three axes of `Elastic` one state every sqrt(steps) steps.
    memory
        Largest number of bytes that each rank stores of forward runs. Default: half of the free
        memory of its host, divided by the number of ranks there. With a `directory`, and with a
        `keep` of "all" or k, it must be left out.
    precision
        The precision of stored histories of steps. None: that of the run. "bfloat16": 8 bits of
        each value, and the range of float32. "float16": 11 bits of each value, and one scale for
        256 values. Both take 2 bytes a value. The gradient is then not exact: docs/acoustic.md has
        measured errors. Stored states are never converted.
    directory
        Directory for files of histories, or of states with `keep=k`. Use a fast disk of the rank's
        host. A rank's file exists without a name, so nothing is left in the directory however the
        run ends. The space of a run is reserved before its first step, and each item has a
        checksum. The file stays open until another run is stored, or the process ends.

    Raises
    ------
    ValueError
        If a parameter is not valid, or two of them exclude each other.

    Notes
    -----
    Errors of files are RuntimeErrors of the run on all ranks. Before the first step: if the
    directory cannot be written, or has not enough space. During the run, or the gradient: if a
    file cannot be written or read, or an item was damaged.

    Examples
    --------
    >>> from mpigrad.grid import Grid
    >>> from mpigrad.waves import Acoustic, Storage
    >>> grid = Grid((40, 30), (10.0, 10.0))
    >>> model = Acoustic(grid, dt=2e-3, steps=80, storage=Storage("boundary"))
    >>> model.storage.keep
    'boundary'
    >>> Storage(20, directory="/scratch")  # a state every 20 steps, in files
    Storage(keep=20, memory=None, precision=None, directory='/scratch')
    """

    keep: int | Literal["all", "boundary"] | None = None
    memory: int | None = None
    precision: Literal["bfloat16", "float16"] | None = None
    directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.keep, np.integer):
            object.__setattr__(self, "keep", int(self.keep))
        keep = self.keep
        counted = isinstance(keep, int) and not isinstance(keep, bool) and keep > 0
        if not (counted or keep in (None, "all", "boundary")):
            raise ValueError(
                f'Storage: keep must be a positive number of steps, "all", "boundary" or None, got '
                f"{keep!r}."
            )
        if self.precision not in _PRECISIONS:
            raise ValueError(
                f'Storage: precision must be "bfloat16", "float16" or None, got {self.precision!r}.'
            )
        memory = self.memory
        if memory is not None and (
            isinstance(memory, bool) or not isinstance(memory, int | np.integer) or memory < 0
        ):
            raise ValueError(
                f"Storage: memory must be an integer of at least 0 bytes, got {memory!r}. Write "
                "3_000_000_000, for instance."
            )
        if self.directory is not None:
            if self.memory is not None:
                raise ValueError(
                    f"Storage: memory={self.memory} limits histories in memory, but with a "
                    "directory they are in files. Give one of both."
                )
            object.__setattr__(self, "directory", os.path.abspath(self.directory))
        for name in ("memory", "precision", "directory"):
            if getattr(self, name) is not None and name not in _WITH[_kind(keep)]:
                raise ValueError(
                    f"Storage: {name}={getattr(self, name)!r} has no effect with keep={keep!r}. "
                    "Leave one of both out."
                )

    @property
    def keep_code(self) -> int:
        """The code of `keep` in the native library."""
        return self.keep if isinstance(self.keep, int) else _CODES[self.keep]

    @property
    def precision_code(self) -> int:
        """The code of the precision in the native library."""
        return _PRECISIONS[self.precision]


def _kind(keep: int | str | None) -> str:
    return "k" if isinstance(keep, int) else str(keep)


# The other parameters that each choice of `keep` has.
_WITH = {
    "None": ("memory", "precision", "directory"),
    "k": ("precision", "directory"),
    "all": ("precision", "directory"),
    "boundary": ("memory",),
}


# ---- The options of wave runs: which case has which of them ----
#
# The checks of the models and the tables in docs/acoustic.md are made from the tables here.


_BYTES, _PRECISION, _FILES = (f"Storage({s}=...)" for s in ("memory", "precision", "directory"))
_STEPS, _ALL, _BOUNDARY = "Storage(k)", 'Storage("all")', 'Storage("boundary")'

# The numbers of axes on which a program has an option. The kernels have all that the JAX programs
# have, so they are the default on CPUs.
PROGRAMS = (("Acoustic", "native"), ("Acoustic", "xla"), ("Elastic", "native"), ("Elastic", "xla"))
AXES: dict[str, tuple[tuple[int, ...], ...]] = {
    "density": ((2, 3), (2, 3), (2, 3), (2, 3)),
    "free_surface": ((2, 3), (2, 3), (2, 3), (2, 3)),
    "relaxation": ((), (), (2, 3), (2, 3)),
    _ALL: ((2, 3), (2, 3), (2, 3), (2, 3)),
    _STEPS: ((2, 3), (), (2, 3), (2, 3)),
    _BOUNDARY: ((2, 3), (), (2, 3), ()),
    _BYTES: ((2, 3), (), (2, 3), ()),
    _PRECISION: ((2, 3), (), (2, 3), ()),
    _FILES: ((2, 3), (), (2, 3), ()),
    "threads": ((2, 3), (), (2, 3), ()),
}

_WORDS = {"native": "the native kernels", "xla": "a JAX program"}


def is_native(backend: str | None) -> bool:
    """Return whether a backend, None for the default, stands for the native kernels.

    They compute on CPUs.
    """
    default = "native" if jax.default_backend() == "cpu" else "xla"
    return (backend or default) == "native"


def runs_native(model: Any) -> bool:
    """Return whether a run of an `Acoustic` or `Elastic` uses the native kernels."""
    return _program(model)[0] == "native"


def check_options(name: str, model: Any) -> None:
    """Raise a ValueError of `name` if the run of a model lacks an option that is given.

    Parameters
    ----------
    model
        An `Acoustic` or `Elastic`, each of whose options is valid by itself.
    """
    program, reason = _program(model)
    physics, axes = type(model).__name__, model.grid.ndim
    for option, text in _given(model):
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


def _axes(option: str, physics: str, program: str) -> tuple[int, ...]:
    return AXES[option][PROGRAMS.index((physics, program))]


def _program(model: Any) -> tuple[Literal["native", "xla"], str]:
    """Return the program that runs a model, and the reason."""
    if model.backend is not None:
        return model.backend, f'backend="{model.backend}"'
    return "native" if is_native(None) else "xla", f"JAX's backend, {jax.default_backend()}"


def _given(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the options of a model that are not defaults, and their texts in errors."""
    if getattr(model, "free_surface", None) is not None:
        yield "free_surface", f"free_surface={model.free_surface!r}"
    if getattr(model, "relaxation", None) is not None:
        yield "relaxation", "relaxation"
    storage = model.storage
    if storage.keep is not None:
        yield {"all": _ALL, "boundary": _BOUNDARY}.get(storage.keep, _STEPS), f"storage={storage}"
    for option, value in (
        (_BYTES, storage.memory), (_PRECISION, storage.precision), (_FILES, storage.directory)
    ):  # fmt: skip
        if value is not None:
            yield option, f"storage={storage}"
    if model.threads is not None:
        yield "threads", f"threads={model.threads}"
