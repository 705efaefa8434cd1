"""Pytrees as messages: the leaves of one dtype travel in one message."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.operations._jax_compat import Primitive
from mpigrad.operations.carrier import carrier
from mpigrad.operations.local_programs import as_array
from mpigrad.operations.packed_arrays import pack, unpack
from mpigrad.runtime.call_sites import call_site

__all__ = [
    "LeafError",
    "Packing",
    "apply_packed",
    "array",
    "arrays",
    "bind_packed",
    "describe_leaves",
    "dtype_of",
]


class LeafError(TypeError):
    """A leaf of a pytree that MPI cannot move."""

    def __init__(self, leaf: Any, found: str, remedy: str) -> None:
        super().__init__(f"expected an array or a pytree of arrays, got {found}. {remedy}")
        self.leaf, self.found, self.remedy = leaf, found, remedy

    def at(self, operation: str, tree: Any, argument: str = "x") -> TypeError:
        """Return the error of an operation, with the place of the leaf in its argument."""
        places, _ = jax.tree_util.tree_flatten_with_path(tree)
        paths = [jax.tree_util.keystr(path) for path, leaf in places if leaf is self.leaf]
        return TypeError(
            f"{operation}: expected an array or a pytree of arrays, got {self.found} at "
            f"{argument}{paths[0] if paths else ''} on rank {MPI.COMM_WORLD.rank}. {self.remedy}"
        )


def array(leaf: Any) -> Any:
    """Return `leaf` as a JAX array, or raise an error if MPI cannot move it."""
    try:
        x = leaf if isinstance(leaf, jax.Array) else as_array(leaf)
    except (TypeError, ValueError):
        found = f"{type(leaf).__name__} ({str(leaf)[:60]!r})"
        remedy = "To send other Python objects use mpi4py, for example comm.mpi.bcast(...)."
        if isinstance(leaf, np.ndarray):
            found = f"{type(leaf).__name__} of dtype {leaf.dtype.str}, which JAX does not have,"
            remedy = "Convert it to a dtype of numbers."
            if not leaf.dtype.isnative:
                remedy = 'Change its byte order by x.astype(x.dtype.newbyteorder("=")).'
        raise LeafError(leaf, found, remedy) from None
    if not isinstance(x.dtype, np.dtype):
        raise LeafError(
            leaf,
            f"dtype {x.dtype}",
            "Send jax.random.key_data(key), and call jax.random.wrap_key_data on the result.",
        )
    if x.dtype.itemsize == 1 and x.dtype.name in _PACKED:
        raise LeafError(
            leaf,
            f"dtype {x.dtype}, which stores several numbers in a byte,",
            "Send x.astype('int8'), or another dtype of 8 bits, and convert the result back.",
        )
    return x


def arrays(operation: str, tree: Any, argument: str = "x") -> Any:
    """Return a pytree with its leaves as arrays, or raise the error of an operation."""
    try:
        return jax.tree.map(array, tree)
    except LeafError as error:
        raise error.at(operation, tree, argument) from None


_PACKED = frozenset(("int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"))


def dtype_of(leaf: Any) -> np.dtype:
    """Return the dtype of `array(leaf)`, for a `leaf` that has a shape and a dtype."""
    if isinstance(leaf, jax.Array):
        return array(leaf).dtype
    try:
        return np.dtype(jnp.result_type(array(leaf) if isinstance(leaf, str) else leaf))
    except TypeError:
        return array(leaf).dtype  # raises the error


def describe_leaves(tree: Any, leading: int = 0) -> str:
    """Describe the leaves of a pytree for the guard, without leading axes; "" for one array."""
    leaves, structure = jax.tree.flatten(tree)
    if jax.tree_util.treedef_is_leaf(structure):
        return ""
    dtypes = [dtype_of(x) for x in leaves]
    types = tuple((jnp.shape(x)[leading:], d) for x, d in zip(leaves, dtypes, strict=True))
    words = _words.get((structure, types))
    if words is None:
        if len(_words) >= _CACHE_SIZE:
            _words.clear()
        places, _ = jax.tree_util.tree_flatten_with_path(tree)
        words = _words[structure, types] = ", ".join(
            f"{jax.tree_util.keystr(path)} {dtype}{list(shape)}"
            for (path, _), (shape, dtype) in zip(places, types, strict=True)
        )
    return words


_words: dict[Any, str] = {}
_CACHE_SIZE = 4096


def apply_packed(
    message: Callable[[Any], Any], tree: Any, *, leading: tuple[int, int] = (0, 0)
) -> Any:
    """Apply `message` once to all leaves of each dtype, and return the structure of `tree`.

    Parameters
    ----------
    message
        Maps an array with leading[0] leading axes and one more axis, along which the leaves are
        concatenated, to an array with leading[1] leading axes and that axis, or to None.
    leading
        The number of leading axes of each leaf that the message treats by itself, in its operand
        and in its result.
    """
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) == 1:  # not packed: the message keeps its shape
        return jax.tree.unflatten(structure, [message(array(leaves[0]))])
    leaves = [array(leaf) for leaf in leaves]
    before, after = leading
    results: list[Any] = [None] * len(leaves)
    kinds = dict.fromkeys((leaf.dtype, leaf.shape[:before]) for leaf in leaves)
    for dtype, lead in kinds:
        members = [i for i, x in enumerate(leaves) if (x.dtype, x.shape[:before]) == (dtype, lead)]
        if len(members) == 1:
            results[members[0]] = message(leaves[members[0]])
            continue
        packed = message(pack([leaves[i] for i in members], before))
        if packed is None:
            continue
        parts = unpack(packed, [leaves[i].shape[before:] for i in members], after)
        for i, part in zip(members, parts, strict=True):
            results[i] = part
    return jax.tree.unflatten(structure, results)


def bind_packed(
    primitive: Primitive,
    x: Any,
    comm: Communicator,
    leading: tuple[int, int] = (0, 0),
    **params: Any,
) -> Any:
    """Send the pytree `x` by one message of `primitive` for each dtype, and return the result."""
    try:
        site, a = call_site(describe_leaves(x, leading[0])), carrier()
        return apply_packed(
            lambda leaf: primitive.bind(leaf, a, comm=comm.slot, site=site, **params)[0],
            x,
            leading=leading,
        )
    except LeafError as error:
        raise error.at(primitive.name.removeprefix("mpigrad_"), x) from None


@dataclass(frozen=True)
class Packing:
    """The messages by which a pytree travels between two ranks, one for each dtype.

    Messages with a derivative come first. Apart from that they keep the order of the leaves: both
    ranks derive the same order, even if they send and receive different structures.
    """

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]

    @staticmethod
    def of(tree: Any, operation: str, argument: str = "x") -> Packing:
        """Return the packing of an array or pytree of arrays, an argument of an operation."""
        leaves, structure = jax.tree.flatten(tree)
        try:
            dtypes = [dtype_of(x) for x in leaves]
        except LeafError as error:
            raise error.at(operation, tree, argument) from None
        shapes = (tuple(jnp.shape(x)) for x in leaves)
        return Packing(structure, tuple(zip(shapes, dtypes, strict=True)))

    @functools.cached_property
    def descriptions(self) -> list[str]:
        """The leaves of each message, for the two ranks to compare; "" for one array."""
        return [
            ""
            if len(members) == 1
            else ", ".join(f"{self.leaves[i][1]}{list(self.leaves[i][0])}" for i in members)
            for members in self._groups
        ]

    @functools.cached_property
    def _groups(self) -> list[list[int]]:
        if len(self.leaves) == 1:
            return [[0]]
        dtypes = dict.fromkeys(dtype for _, dtype in self.leaves)
        ordered = sorted(dtypes, key=lambda dtype: not jnp.issubdtype(dtype, jnp.inexact))
        return [[i for i, (_, d) in enumerate(self.leaves) if d == dtype] for dtype in ordered]

    @property
    def messages(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """The shape and dtype of each message. A leaf that travels alone keeps its shape."""
        return [
            self.leaves[members[0]]
            if len(members) == 1
            else (
                (sum(math.prod(self.leaves[i][0]) for i in members),),
                self.leaves[members[0]][1],
            )
            for members in self._groups
        ]

    def pack(self, tree: Any) -> list[Any]:
        """Return the messages that hold `tree`."""
        leaves = [array(leaf) for leaf in jax.tree.leaves(tree)]
        return [
            leaves[members[0]] if len(members) == 1 else pack([leaves[i] for i in members])
            for members in self._groups
        ]

    def unpack(self, messages: Sequence[Any]) -> Any:
        """Return the tree that `messages` hold."""
        leaves: list[Any] = [None] * len(self.leaves)
        for members, message in zip(self._groups, messages, strict=True):
            if len(members) == 1:
                leaves[members[0]] = message
                continue
            parts = unpack(message, [self.leaves[i][0] for i in members])
            for i, part in zip(members, parts, strict=True):
                leaves[i] = part
        return jax.tree.unflatten(self.structure, leaves)
