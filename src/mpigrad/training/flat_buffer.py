"""Contiguous memory for parameters or gradients, and sums of it in a fixed order."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import pathlib
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mpigrad.communicator import Communicator

__all__ = [
    "HEADER",
    "FlatBuffer",
    "Memory",
    "Parameter",
    "combine",
    "scale",
]

# ---- Memory that the other ranks of this host can read and write ----


_NAME = "mpigrad-training"
_TOKEN = 16  # bytes
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


class Memory:
    """Zero-initialised memory, in an anonymous file if the system has `memfd_create`.

    Parameters
    ----------
    size
        Size in bytes, at least 16.

    Attributes
    ----------
    bytes
        The memory, shape (max(size, 16),), aligned to a page.
    """

    bytes: NDArray[np.uint8]

    def __init__(self, size: int) -> None:
        self._file, size = -1, max(size, _TOKEN)
        try:
            self._file = os.memfd_create(_NAME)
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size)
            self.bytes = _mapped(self._file, size)
        except (AttributeError, OSError):  # no memfd_create: memory of this rank only
            self._file = -1
            self.bytes = np.zeros(size, np.uint8)

    def map_all(self, comm: Communicator) -> list[NDArray[np.uint8] | None]:
        """Map every rank's memory, or None for ranks on another host (collective).

        The memories of all ranks have the same size. Two ranks map each other's memory, or neither
        does.
        """
        before = self.bytes[:_TOKEN].copy()
        token = uuid.uuid4().bytes
        self.bytes[:_TOKEN] = np.frombuffer(token, np.uint8)
        boot = _BOOT.read_text() if _BOOT.exists() else token.hex()
        everybody = comm.mpi.allgather((boot, os.getpid(), self._file, token))
        memories: list[NDArray[np.uint8] | None] = [None] * comm.size
        for rank, (there, process, file, expected) in enumerate(everybody):
            if rank == comm.rank:
                memories[rank] = self.bytes
            elif there == boot and file >= 0 and self._file >= 0:
                memories[rank] = _opened(process, file, self.bytes.size, expected)
        seen = comm.mpi.allgather([memory is not None for memory in memories])
        self.bytes[:_TOKEN] = before  # all ranks have read the token
        return [m if seen[rank][comm.rank] else None for rank, m in enumerate(memories)]


def _opened(process: int, file: int, size: int, token: bytes) -> NDArray[np.uint8] | None:
    path = f"/proc/{process}/fd/{file}"
    with contextlib.suppress(OSError):
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None  # a process of another container has this number here
        handle = os.open(path, os.O_RDWR)
        try:
            if os.fstat(handle).st_size != size:
                return None
            memory = _mapped(handle, size)
        finally:
            os.close(handle)
        if memory[:_TOKEN].tobytes() == token:
            return memory
    return None


def _mapped(file: int, size: int) -> NDArray[Any]:
    return np.frombuffer(mmap.mmap(file, size, flags=mmap.MAP_SHARED), np.uint8)


# ---- Sums over ranks in a fixed order, with the same bits on every rank ----


_CHUNK = 1 << 15  # numbers that are added, scaled, squared and copied together, within the cache
_USUAL = 1e-30  # sums of squares between this and its inverse lose nothing in float32


def _arithmetic(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of sums and products, to which factors are rounded, too."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def scale(numbers: NDArray[Any], factor: float) -> None:
    """Multiply numbers by a factor in place, with 16-bit numbers in float32 arithmetic."""
    dtype = _arithmetic(numbers.dtype)
    np.multiply(numbers, dtype.type(factor), out=numbers, dtype=dtype, casting="unsafe")


def combine(
    pieces: Sequence[NDArray[Any]],
    scale: float,
    out: NDArray[Any],
    copies: Sequence[NDArray[Any]] = (),
    nonfinite: list[tuple[int, list[int]]] | None = None,
    factors: Sequence[float] | None = None,
) -> float:
    """Set `out` to ((pieces[0] + pieces[1]) + ...) · scale, and return its sum of squares.

    Parameters
    ----------
    pieces
        Arrays of shape (n,) of one real floating-point dtype. The arithmetic for 16-bit dtypes is
        float32.
    scale
        The factor, which is rounded to the dtype of the arithmetic.
    out, copies
        Arrays of shape (n,) and the pieces' dtype that receive the result. They may be pieces.
    nonfinite
        A list that receives, for each chunk with a non-finite number, its index and the indices of
        the pieces that are not finite there.
    factors
        A factor for each piece, rounded like `scale`, by which it is multiplied before the sum.

    Returns
    -------
    float
        The sum of squares. It is not finite if `out` has a non-finite number, or if a square
        overflows in float64.
    """
    dtype = _arithmetic(out.dtype)
    factor = dtype.type(scale)
    chunk = np.empty(min(_CHUNK, out.size), dtype)
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, out.size, _CHUNK):
            here = slice(start, min(start + _CHUNK, out.size))
            sums = chunk[: here.stop - start]
            terms = [piece[here] for piece in pieces]
            if factors is not None:
                terms = [
                    np.multiply(term, dtype.type(f), dtype=dtype, casting="unsafe")
                    for term, f in zip(terms, factors, strict=True)
                ]
            first, *rest = terms
            for piece in rest:
                np.add(first, piece, out=sums, dtype=dtype, casting="unsafe")
                first = sums
            np.multiply(first, factor, out=sums, dtype=dtype, casting="unsafe")
            if out.dtype != dtype:
                sums[:] = sums.astype(out.dtype)  # numbers out of range become infinite
            square = float(np.dot(sums, sums))
            if not _USUAL < square < 1 / _USUAL and dtype == np.float32:  # squares are lost
                exact = sums.astype(np.float64)
                square = float(np.dot(exact, exact))
            if not math.isfinite(square) and nonfinite is not None:
                _look([piece[here] for piece in pieces], sums, start, nonfinite)
            total += square
            for target in (out, *copies):
                target[here] = sums
    return total


def _look(
    pieces: Sequence[NDArray[Any]],
    sums: NDArray[Any],
    start: int,
    nonfinite: list[tuple[int, list[int]]],
) -> None:
    bad = np.flatnonzero(~np.isfinite(sums))
    if bad.size:
        at = int(bad[0])
        whose = [i for i, piece in enumerate(pieces) if not jnp.isfinite(piece[at])]
        nonfinite.append((start + at, whose or list(range(len(pieces)))))  # a sum may overflow


# ---- Contiguous memory for all parameters of a model, or for their gradients ----


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
        local = self.sections[section]
        offset = local.ctypes.data - self.memory.bytes.ctypes.data
        return memory[offset : offset + local.nbytes].view(local.dtype)

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
