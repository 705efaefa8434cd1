"""Parameters, or their gradients, one after the other in one piece of memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mpigrad.training.memory import Memory
from mpigrad.training.summation import scale

__all__ = ["HEADER", "Flat", "Parameter"]

HEADER = 16  # numbers (float64) before the first section, free for a message's header
_ALIGNMENT = 64  # bytes; that of XLA's own buffers, so that it can read sections where they are


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Name, shape and dtype (as NumPy and ml_dtypes name it) of a trainable array."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def real(self) -> np.dtype[Any]:
        """The dtype of its numbers; a complex one is a pair of real ones."""
        dtype = jnp.dtype(self.dtype)
        return np.finfo(dtype).dtype if dtype.kind == "c" else dtype

    @property
    def numbers(self) -> int:
        """How many real numbers it is."""
        return math.prod(self.shape) * (jnp.dtype(self.dtype).itemsize // self.real.itemsize)

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {self.shape})"


class Flat:
    """One number for each of some parameters' numbers; zeros at first.

    Parameters
    ----------
    parameters
        What it holds.
    order
        Their order in memory; as they come if not given. Parameters of one dtype lie together.

    Attributes
    ----------
    memory
        What it lies in: other ranks of the host can be shown it.
    message
        All of the memory as one array of float64, to be sent as it is: the header, the sections,
        and some bytes between them.
    header
        Its first `HEADER` numbers, for whoever sends it.
    sections
        An array of shape (n,) for each dtype, without holes.
    arrays
        For each parameter its part of a section, in its shape and dtype.
    places
        For each parameter (section, start, stop).
    """

    def __init__(self, parameters: Sequence[Parameter], order: Sequence[int] | None = None) -> None:
        self.parameters = tuple(parameters)
        self.order = tuple(range(len(self.parameters)) if order is None else order)
        if sorted(self.order) != list(range(len(self.parameters))):
            raise ValueError(f"Flat: order={order} is none of {len(self.parameters)} parameters")
        dtypes = list(dict.fromkeys(p.real for p in self.parameters))
        sizes = [sum(p.numbers for p in self.parameters if p.real == d) for d in dtypes]
        ends = HEADER * 8 + np.cumsum(
            [0] + [_rounded(n * d.itemsize) for n, d in zip(sizes, dtypes, strict=True)]
        )
        self.memory = Memory(int(ends[-1]))
        memory = self.memory.bytes
        self.message: NDArray[np.float64] = memory.view(np.float64)
        self.header: NDArray[np.float64] = self.message[:HEADER]
        self.sections: tuple[NDArray[Any], ...] = tuple(
            memory[start : start + n * dtype.itemsize].view(dtype)
            for start, n, dtype in zip(ends[:-1].tolist(), sizes, dtypes, strict=True)
        )
        places: dict[int, tuple[int, int, int]] = {}
        filled = [0] * len(dtypes)
        for index in self.order:
            parameter = self.parameters[index]
            section = dtypes.index(parameter.real)
            start = filled[section]
            filled[section] = start + parameter.numbers
            places[index] = section, start, filled[section]
        self.places = tuple(places[index] for index in range(len(self.parameters)))
        self.arrays: tuple[NDArray[Any], ...] = tuple(
            self.sections[section][start:stop].view(jnp.dtype(p.dtype)).reshape(p.shape)
            for p, (section, start, stop) in zip(self.parameters, self.places, strict=True)
        )

    def multiply(self, factor: float) -> None:
        """Multiply all numbers (see `scale`); by 0 all become 0, whatever they were."""
        for section in self.sections:
            if factor == 0:
                section.fill(0)
            else:
                scale(section, factor)

    def section_of(self, memory: NDArray[np.uint8], section: int) -> NDArray[Any]:
        """The section where it lies in a memory like this one, such as another rank's."""
        mine = self.sections[section]
        offset = mine.ctypes.data - self.memory.bytes.ctypes.data
        return memory[offset : offset + mine.nbytes].view(mine.dtype)

    def parameter_at(self, section: int, index: int) -> Parameter:
        """Whose number it is that lies there."""
        for parameter, (s, start, stop) in zip(self.parameters, self.places, strict=True):
            if s == section and start <= index < stop:
                return parameter
        raise IndexError(f"section {section} has no number {index}")


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
