"""Pytrees as messages: the leaves of one dtype travel together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator
from mpigrad.operations._jax_compat import Primitive
from mpigrad.operations.carrier import carrier
from mpigrad.runtime.call_sites import call_site

__all__ = ["Packing", "array", "dtype_of", "in_words", "over_packed", "packed"]


def array(leaf: Any) -> Any:
    """`leaf` as an array; arrays as they are (`jnp.asarray` costs more than a message)."""
    try:
        x = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{str(leaf)[:60]!r}, of type {type(leaf).__name__}, is no array of numbers, and no "
            "pytree of such arrays; other objects go by mpi4py, comm.mpi.bcast(…) for instance"
        ) from error
    if not isinstance(x.dtype, np.dtype):
        raise TypeError(
            f"MPI cannot move arrays of {x.dtype}; send the bits of a random key, "
            "jax.random.key_data(key), and wrap_key_data what comes"
        )
    if x.dtype.itemsize == 1 and x.dtype.name in _PACKED:
        raise TypeError(
            f"arrays of {x.dtype} have several numbers in a byte, and are not moved: send x.astype "
            "of a dtype of 8 bits, and take what comes back to it"
        )
    return x


_PACKED = frozenset(("int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"))


def dtype_of(leaf: Any) -> np.dtype:
    """That of `array(leaf)`; `leaf` may have a shape and a dtype only."""
    if isinstance(leaf, jax.Array):
        return array(leaf).dtype
    try:
        return np.dtype(jnp.result_type(array(leaf) if isinstance(leaf, str) else leaf))
    except TypeError:
        return array(leaf).dtype  # says what is wrong


def in_words(tree: Any, leading: int = 0) -> str:
    """The arrays of a pytree, without their leading axes, for ranks to compare; "" of one array."""
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) < 2:
        return ""
    dtypes = [dtype_of(x) for x in leaves]
    types = tuple((jnp.shape(x)[leading:], d) for x, d in zip(leaves, dtypes, strict=True))
    words = _words.get((structure, types))
    if words is None:
        if len(_words) >= _KEPT:
            _words.clear()
        places, _ = jax.tree_util.tree_flatten_with_path(tree)
        words = _words[structure, types] = ", ".join(
            f"{jax.tree_util.keystr(path)} {dtype}{list(shape)}"
            for (path, _), (shape, dtype) in zip(places, types, strict=True)
        )
    return words


_words: dict[Any, str] = {}
_KEPT = 4096


def over_packed(
    message: Callable[[Any], Any], tree: Any, *, leading: tuple[int, int] = (0, 0)
) -> Any:
    """`message` of all leaves of one dtype at once, in the structure of `tree`.

    Parameters
    ----------
    message
        Maps an array with leading[0] leading axes and one axis more, along which leaves are laid
        side by side, to an array with leading[1] leading axes and that axis; or to None.
    leading
        Leading axes of each leaf that the message treats by itself, before and after.
    """
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) == 1:  # nothing to pack: the message keeps its shape
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
        widths = [math.prod(leaves[i].shape[before:]) for i in members]
        flat = [leaves[i].reshape(*lead, n) for i, n in zip(members, widths, strict=True)]
        packed = message(jnp.concatenate(flat, axis=before))
        if packed is None:
            continue
        ends = np.cumsum([0, *widths])
        for i, start, end in zip(members, ends[:-1], ends[1:], strict=True):
            part = jax.lax.slice_in_dim(packed, int(start), int(end), axis=after)
            results[i] = part.reshape(*packed.shape[:after], *leaves[i].shape[before:])
    return jax.tree.unflatten(structure, results)


def packed(
    primitive: Primitive,
    x: Any,
    comm: Communicator,
    leading: tuple[int, int] = (0, 0),
    **params: Any,
) -> Any:
    """The messages of `primitive`, one for each dtype of the pytree `x`."""
    site, a = call_site(in_words(x, leading[0])), carrier()
    return over_packed(
        lambda leaf: primitive.bind(leaf, a, comm=comm.slot, site=site, **params)[0],
        x,
        leading=leading,
    )


@dataclass(frozen=True)
class Packing:
    """How a pytree travels between two ranks: one message for each dtype.

    Messages with a derivative come first, else they keep the order of the leaves: both sides find
    the same order, also where what is sent and what is received have different structures.
    """

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]

    @staticmethod
    def of(tree: Any) -> Packing:
        """The packing of an array or pytree of arrays."""
        leaves, structure = jax.tree.flatten(tree)
        dtypes = [dtype_of(x) for x in leaves]
        shapes = (tuple(jnp.shape(x)) for x in leaves)
        return Packing(structure, tuple(zip(shapes, dtypes, strict=True)))

    @functools.cached_property
    def in_words(self) -> list[str]:
        """Of each message its leaves, for the two ranks to compare; "" of one array."""
        return [
            ""
            if len(members) == 1
            else ", ".join(f"{self.leaves[i][1]}{list(self.leaves[i][0])}" for i in members)
            for members in self._groups
        ]

    @property
    def _groups(self) -> list[list[int]]:
        dtypes = dict.fromkeys(dtype for _, dtype in self.leaves)
        ordered = sorted(dtypes, key=lambda dtype: not jnp.issubdtype(dtype, jnp.inexact))
        return [[i for i, (_, d) in enumerate(self.leaves) if d == dtype] for dtype in ordered]

    @property
    def messages(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each message. A leaf that travels alone keeps its shape."""
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
        """The messages that hold `tree`."""
        leaves = [array(leaf) for leaf in jax.tree.leaves(tree)]
        return [
            leaves[members[0]]
            if len(members) == 1
            else jnp.concatenate([leaves[i].ravel() for i in members])
            for members in self._groups
        ]

    def unpack(self, messages: Sequence[Any]) -> Any:
        """The tree that `messages` hold."""
        leaves: list[Any] = [None] * len(self.leaves)
        for members, message in zip(self._groups, messages, strict=True):
            if len(members) == 1:
                leaves[members[0]] = message
                continue
            start = 0
            for i in members:
                shape = self.leaves[i][0]
                stop = start + math.prod(shape)
                leaves[i] = message[start:stop].reshape(shape)
                start = stop
        return jax.tree.unflatten(self.structure, leaves)
