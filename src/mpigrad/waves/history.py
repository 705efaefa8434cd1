"""How waves store the history of a run for its gradient."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

__all__ = ["History", "Memory", "history_of"]

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
