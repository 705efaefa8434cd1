"""The layout of a tree: the part of each array that a rank holds, and its leaves in NumPy."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid

__all__ = [
    "Layout",
    "Leaf",
    "Stripes",
    "check_replicated",
    "cover_once",
    "describe",
    "dtype_of",
    "is_kind",
    "is_number",
    "kind_of",
    "leaf_from_bytes",
    "leaf_to_bytes",
    "local_shape",
    "parse",
    "text_of",
    "to_host",
    "to_leaf",
]

# ---- Conversion between the leaves of a tree and NumPy arrays ----


# Python numbers are written as text, which is exact for any length. A NumPy scalar of a subclass of
# a Python type (float64 is one) is written in the same way, so that either can be read.
_PYTHON = {
    bool: lambda text: text == "True",
    int: int,
    float: float,
    complex: complex,
}


def kind_of(leaf: Any) -> str:
    """Return the dtype of a leaf, "key<...>" for JAX's random keys, or "Python <type>".

    Raises
    ------
    TypeError
        If the leaf cannot be written.
    """
    for number in _PYTHON:
        if isinstance(leaf, number):
            return f"Python {number.__name__}"
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        raise TypeError(f"expected an array or a number, got {type(leaf).__name__}")
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return str(dtype)
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(f"expected an array of a numeric or boolean dtype, got {dtype}")
    return np.dtype(dtype).name


def is_kind(kind: str) -> bool:
    """Return whether `kind_of` may have returned this text."""
    if is_number(kind):
        return kind.removeprefix("Python ") in {number.__name__ for number in _PYTHON}
    if _is_key(kind):
        return True
    try:
        dtype = np.dtype(kind)
    except (TypeError, ValueError):
        return False
    numeric = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    return bool(numeric) and dtype.name == kind


def is_number(kind: str) -> bool:
    """Return whether a leaf of this kind is a Python number."""
    return kind.startswith("Python ")


def _is_key(kind: str) -> bool:
    return kind.startswith("key<")


def dtype_of(kind: str) -> np.dtype[Any]:
    """Return the dtype that represents a leaf in a file."""
    return np.dtype(np.uint32 if _is_key(kind) else kind)


def local_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of the array that represents a leaf in a file."""
    if is_number(kind_of(leaf)):
        return ()
    if _is_key(kind_of(leaf)):
        return tuple(jax.eval_shape(jax.random.key_data, leaf).shape)
    return tuple(leaf.shape)


def to_host(leaf: Any) -> NDArray[Any]:
    """Return an array or random keys as a contiguous array in this machine's byte order."""
    kind = kind_of(leaf)
    numbers = np.asarray(jax.random.key_data(leaf) if _is_key(kind) else leaf)
    return np.ascontiguousarray(numbers, dtype_of(kind)).reshape(numbers.shape)


def text_of(leaf: Any) -> str:
    """Return a Python number as text, which `parse` reads."""
    return next(repr(number(leaf)) for number in _PYTHON if isinstance(leaf, number))


def parse(kind: str, text: str) -> Any:
    """Return a Python number, given its text."""
    return next(f(text) for number, f in _PYTHON.items() if kind == f"Python {number.__name__}")


def to_leaf(numbers: NDArray[Any], like: Any) -> Any:
    """Return a leaf of the type of `like` with these values."""
    if _is_key(kind_of(like)):
        return jax.random.wrap_key_data(jnp.array(numbers), impl=jax.random.key_impl(like))
    if isinstance(like, np.ndarray | np.generic):
        return numbers[()] if isinstance(like, np.generic) else numbers
    if getattr(like, "weak_type", False) and numbers.ndim == 0:
        return jnp.asarray(
            numbers.item()
        )  # weakly typed as before, so that no program is compiled again
    return jnp.array(numbers)


def leaf_to_bytes(leaf: Any) -> NDArray[np.uint8]:
    """Return an array or random keys as bytes, which `leaf_from_bytes` reads.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.checkpoint import leaf_from_bytes, leaf_to_bytes
    >>> leaf_from_bytes(leaf_to_bytes(jnp.arange(3.0)), like=jnp.zeros(3))
    Array([0., 1., 2.], dtype=float32)
    """
    if is_number(kind_of(leaf)):
        raise TypeError(
            f"leaf_to_bytes: expected an array or random keys, got {leaf!r}. Use numpy.asarray."
        )
    return to_host(leaf).reshape(-1).view(np.uint8)


def leaf_from_bytes(data: NDArray[np.uint8], like: Any) -> Any:
    """Return the leaf that `leaf_to_bytes` wrote, with the type and shape of `like`.

    Examples
    --------
    >>> import jax
    >>> from mpigrad.checkpoint import leaf_from_bytes, leaf_to_bytes
    >>> keys = jax.random.split(jax.random.key(0), 2)
    >>> bool((leaf_from_bytes(leaf_to_bytes(keys), like=keys) == keys).all())
    True
    """
    dtype, shape = dtype_of(kind_of(like)), local_shape(like)
    if data.size != dtype.itemsize * math.prod(shape):
        raise ValueError(
            f"leaf_from_bytes: expected {dtype.itemsize * math.prod(shape)} bytes for "
            f"{dtype}{list(shape)}, got {data.size}. Give the `like` of the leaf that was written."
        )
    return to_leaf(data.view(dtype).reshape(shape), like)


# ---- The layout of a tree: the part of each array that a rank holds ----


@dataclasses.dataclass(frozen=True)
class Stripes:
    """Layout of an array whose rows along `axis` are split over the ranks, in rank order.

    The count of rows may differ between ranks, and may be zero.

    Attributes
    ----------
    axis
        The axis that is split. It may be negative.

    Examples
    --------
    >>> import numpy as np
    >>> from mpigrad.checkpoint import Store, Stripes
    >>> columns = np.ones((3, 2))  # this rank's columns of a matrix
    >>> Store("saves").save(1, {"a": columns}, {"a": Stripes(axis=1)}).name
    'save-000001'
    """

    axis: int = 0


# A pytree prefix. Each leaf is the layout of the arrays at its place and below. False: the same on
# all ranks. True: stripes of axis 0. Stripes(axis): stripes of that axis. A Grid: tiles in the
# trailing axes.
Layout = Any

Boxes = NDArray[np.int64]
_MOST_SPLIT = 8  # axes that are split over ranks: a grid has three


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a tree, over all ranks.

    Attributes
    ----------
    name
        Its path in the tree.
    kind
        Its dtype or type, as `kind_of` returns it.
    shape
        Shape of the global array.
    boxes
        First index and index after the last of every rank's piece, of shape (ranks, 2, axes). None
        if all ranks hold the global array.
    number
        The text of a Python number, or None.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    boxes: Boxes | None
    number: str | None = None

    def __str__(self) -> str:
        return self.kind if is_number(self.kind) else f"{self.kind} {self.shape}"

    def box(self, rank: int) -> Boxes:
        """Return a rank's first index and index after the last, of shape (2, axes)."""
        if self.boxes is None:
            return np.array([[0] * len(self.shape), self.shape], np.int64)
        return self.boxes[rank]

    def bytes_of(self, rank: int) -> int:
        """Return how many bytes a rank writes. Only rank 0 writes replicated arrays."""
        if is_number(self.kind) or (self.boxes is None and rank > 0):
            return 0
        start, stop = self.box(rank)
        return math.prod((stop - start).tolist()) * dtype_of(self.kind).itemsize


@dataclasses.dataclass(frozen=True)
class _Piece:
    """This rank's piece of a leaf."""

    name: str
    kind: str
    shape: tuple[int, ...]
    axis: int | None  # of stripes
    tiles: tuple[tuple[slice, ...], ...] | None  # of a grid, for all ranks
    number: str | None

    def replicated_properties(self) -> tuple[Any, ...]:
        """Return the properties that must be the same on all ranks."""
        shape = list(self.shape)
        if self.axis is not None:
            shape[self.axis] = -1
        if self.tiles is not None:
            shape[len(shape) - len(self.tiles[0]) :] = [-1] * len(self.tiles[0])
        return self.name, self.kind, shape, self.axis, self.number


def describe(tree: Any, layout: Layout, comm: Communicator, what: str) -> list[Leaf]:
    """Return the leaves of a tree over all ranks (collective).

    Raises
    ------
    ValueError, TypeError
        On every rank, if the layout does not fit the tree, a leaf cannot be written, or the trees
        differ between ranks. The message begins with `what`.
    """
    pieces: list[_Piece] = []
    with raise_on_all_ranks(comm):
        pieces = _pieces(tree, layout, comm, what)
    everywhere = comm.mpi.allgather(pieces)
    for rank, others in enumerate(everywhere):
        if len(others) != len(everywhere[0]):
            raise ValueError(
                f"{what}: the tree has {len(everywhere[0])} leaves on rank 0 and {len(others)} on "
                f"rank {rank}. Give the same structure on all ranks."
            )
        for ours, theirs in zip(everywhere[0], others, strict=True):
            if ours.replicated_properties() != theirs.replicated_properties():
                raise ValueError(
                    f"{what}: {ours.name} is {_text(ours)} on rank 0, {theirs.name} is "
                    f"{_text(theirs)} on rank {rank}. Make it the same on all ranks, or give True, "
                    "Stripes(axis) or its Grid in the layout if each rank holds a part."
                )
    return [_join(list(leaf)) for leaf in zip(*everywhere, strict=True)]


def _text(piece: _Piece) -> str:
    if piece.number is not None:
        return piece.number
    how = "" if piece.axis is None else f", stripes of axis {piece.axis}"
    return f"{piece.kind} {piece.shape}{how}"


def _pieces(tree: Any, layout: Layout, comm: Communicator, what: str) -> list[_Piece]:
    try:
        hows = jax.tree.leaves(jax.tree.broadcast(layout, tree, is_leaf=_is_layout))
    except ValueError as error:
        raise ValueError(
            f"{what}: the layout is not a pytree prefix of the tree: {error}"
        ) from error
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        _piece(jax.tree_util.keystr(path) or "the tree", leaf, how, comm, what)
        for (path, leaf), how in zip(leaves, hows, strict=True)
    ]


def _is_layout(x: Any) -> bool:
    return isinstance(x, bool | Stripes | Grid)


def _piece(name: str, leaf: Any, how: Any, comm: Communicator, what: str) -> _Piece:
    try:
        kind, shape = kind_of(leaf), local_shape(leaf)
    except TypeError as error:
        raise TypeError(f"{what}: {name}: {error}") from None
    number = text_of(leaf) if is_number(kind) else None
    if isinstance(how, bool):
        if not how:
            return _Piece(name, kind, shape, None, None, number)
        how = Stripes()
    if isinstance(how, Stripes):
        if not -len(shape) <= how.axis < len(shape):
            raise ValueError(
                f"{what}: {name} has shape {shape}, but its layout is {how}. Give an axis that "
                "it has."
            )
        return _Piece(name, kind, shape, how.axis % len(shape), None, number)
    if not isinstance(how, Grid):
        raise TypeError(
            f"{what}: the layout of {name} is of type {type(how).__name__}, expected False, True, "
            "Stripes(axis) or a Grid"
        )
    if MPI.Comm.Compare(how.comm.mpi, comm.mpi) not in (MPI.IDENT, MPI.CONGRUENT):
        raise ValueError(
            f"{what}: the grid of {name} has another communicator than the restart files. Use the "
            "same communicator for both."
        )
    if len(shape) < how.ndim or shape[len(shape) - how.ndim :] != how.local_shape:
        raise ValueError(
            f"{what}: {name} has shape {shape} on rank {comm.rank}, but the tile of this rank has "
            f"shape {how.local_shape}. Put the axes of the tile last."
        )
    tiles = tuple(how.slices_of(rank) for rank in range(comm.size))
    return _Piece(name, kind, shape, None, tiles, number)


def _join(pieces: list[_Piece]) -> Leaf:
    """Return the leaf over all ranks, given every rank's piece."""
    first = pieces[0]
    if first.axis is None and first.tiles is None:
        return Leaf(first.name, first.kind, first.shape, None, first.number)
    shapes = np.array([piece.shape for piece in pieces], np.int64)
    boxes = np.stack([np.zeros_like(shapes), shapes], 1)
    if first.axis is not None:
        ends = np.cumsum(shapes[:, first.axis])
        boxes[:, 1, first.axis] = ends
        boxes[1:, 0, first.axis] = ends[:-1]
    if first.tiles is not None:
        for box, tile in zip(boxes, first.tiles, strict=True):
            box[:, shapes.shape[1] - len(tile) :] = [
                [part.start for part in tile],
                [part.stop for part in tile],
            ]
    whole = tuple(int(n) for n in np.max(boxes[:, 1], axis=0))
    return Leaf(first.name, first.kind, whole, boxes)


def cover_once(boxes: Boxes, shape: tuple[int, ...]) -> bool:
    """Return whether boxes of shape (ranks, 2, axes) cover an array, each element once."""
    whole = np.array([[0] * len(shape), shape], np.int64)
    starts, stops = boxes[:, 0], boxes[:, 1]
    if not np.all((whole[0] <= starts) & (starts <= stops) & (stops <= whole[1])):
        return False
    split = np.nonzero(np.any((starts > 0) | (stops < whole[1]) | (whole[1] == 0), axis=0))[0]
    if len(split) > _MOST_SPLIT:
        return False
    # A sum of boxes is determined by its corners, if each counts +1 or -1 in turn.
    every = np.concatenate([boxes, whole[None]])[:, :, split]
    signs = np.append(np.ones(len(boxes), np.int64), -1)
    corners, weights = [], []
    for ends in itertools.product((0, 1), repeat=len(split)):
        corners.append(every[:, ends, range(len(split))])
        weights.append(signs * (-1) ** sum(ends))
    _, place = np.unique(np.concatenate(corners), axis=0, return_inverse=True)
    return not np.any(np.bincount(place.ravel(), np.concatenate(weights)))


def check_replicated(leaves: list[Leaf], tree: Any, comm: Communicator, what: str) -> None:
    """Raise an error on every rank unless replicated arrays are bitwise equal on all ranks.

    A restart gives the arrays of rank 0 to all ranks. If they differ before the save, the restarted
    run differs from the original one.
    """
    digests: dict[str, str] = {}
    with raise_on_all_ranks(comm):
        for leaf, value in zip(leaves, jax.tree.leaves(tree), strict=True):
            if leaf.boxes is None and leaf.number is None:
                numbers = to_host(value).reshape(-1).view(np.uint8)
                digests[leaf.name] = hashlib.sha256(numbers.data).hexdigest()
    everywhere = comm.mpi.allgather(digests)
    for rank, others in enumerate(everywhere):
        for name, digest in others.items():
            if digest != everywhere[0][name]:
                raise ValueError(
                    f"{what}: {name} differs between ranks 0 and {rank}, but its layout is False. "
                    "Make it equal, for example with mpigrad.bcast, or give True, Stripes(axis) or "
                    "its Grid."
                )
