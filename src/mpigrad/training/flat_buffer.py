"""Contiguous memory for all parameters of a model, or for their gradients."""

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

__all__ = ["HEADER", "FlatBuffer", "Parameter"]

HEADER = 16  # numbers (float64) before the first section, free for a message's header
_ALIGNMENT = 64  # bytes, as for XLA's own buffers, so that XLA can read sections without a copy


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The name, shape and dtype of a trainable array.

    Attributes
    ----------
    name
        A name that identifies the array in errors.
    shape
        Its shape.
    dtype
        The name of its dtype in NumPy or ml_dtypes, for instance "float32" or "bfloat16".

    Examples
    --------
    >>> from mpigrad import training
    >>> parameter = training.Parameter("weights", (3, 2), "complex64")
    >>> print(parameter, parameter.numbers)
    weights (complex64 (3, 2)) 12
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def real(self) -> np.dtype[Any]:
        """The dtype of its real numbers. A complex number has two of them."""
        dtype = jnp.dtype(self.dtype)
        return np.finfo(dtype).dtype if dtype.kind == "c" else dtype

    @property
    def numbers(self) -> int:
        """The count of its real numbers."""
        return math.prod(self.shape) * (jnp.dtype(self.dtype).itemsize // self.real.itemsize)

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {self.shape})"


class FlatBuffer:
    """A contiguous buffer with an entry for each number of some parameters, initially zero.

    Parameters
    ----------
    parameters
        The parameters.
    order
        Their order in memory, as a permutation of their indices (default: the order of
        `parameters`). Parameters of one dtype are adjacent.

    Attributes
    ----------
    memory
        The memory, which other ranks of the host can map.
    message
        All of the memory as one array of float64 that can be sent: the header, the sections, and
        padding between them.
    header
        The first `HEADER` numbers of `message`, free for the sender.
    sections
        An array of shape (n,) for each dtype, without gaps.
    arrays
        For each parameter its part of a section, in its shape and dtype.
    places
        For each parameter the triple (section, start, stop).

    Raises
    ------
    ValueError
        If `order` is not a permutation of the indices of `parameters`.

    Examples
    --------
    >>> from mpigrad import training
    >>> a = training.Parameter("a", (2,), "float32")
    >>> b = training.Parameter("b", (), "float32")
    >>> buffer = training.FlatBuffer([a, b])
    >>> buffer.arrays[1][...] = 3.0
    >>> buffer.sections[0].tolist()
    [0.0, 0.0, 3.0]
    """

    def __init__(self, parameters: Sequence[Parameter], order: Sequence[int] | None = None) -> None:
        self.parameters = tuple(parameters)
        self.order = tuple(range(len(self.parameters)) if order is None else order)
        if sorted(self.order) != list(range(len(self.parameters))):
            raise ValueError(
                f"FlatBuffer: order must be a permutation of the indices of "
                f"{len(self.parameters)} parameters, got {order}. Pass each index once."
            )
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
        """Multiply all numbers by a factor. The factor 0 sets all to 0, also NaN."""
        for section in self.sections:
            if factor == 0:
                section.fill(0)
            else:
                scale(section, factor)

    def section_of(self, memory: NDArray[np.uint8], section: int) -> NDArray[Any]:
        """Return the section in a memory with the layout of this one, such as another rank's."""
        mine = self.sections[section]
        offset = mine.ctypes.data - self.memory.bytes.ctypes.data
        return memory[offset : offset + mine.nbytes].view(mine.dtype)

    def parameter_at(self, section: int, index: int) -> Parameter:
        """Return the parameter that an index of a section belongs to."""
        for parameter, (s, start, stop) in zip(self.parameters, self.places, strict=True):
            if s == section and start <= index < stop:
                return parameter
        raise IndexError(
            f"FlatBuffer.parameter_at: section {section} does not have the index {index}. Pass an "
            "index within the section."
        )


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
