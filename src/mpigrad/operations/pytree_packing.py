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
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir
from mpigrad.operations.carrier import carrier, without_carriers
from mpigrad.operations.local_programs import as_array
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import library

__all__ = [
    "LeafError",
    "Packing",
    "apply_packed",
    "array",
    "arrays",
    "bind_packed",
    "describe_leaves",
    "dtype_of",
    "pack",
    "unpack",
]

# ---- Copies of many arrays into one array and back, as one instruction of a compiled program


def pack(leaves: Sequence[Any], leading: int = 0) -> Any:
    """Return arrays with their axes after the leading ones flattened and concatenated.

    Parameters
    ----------
    leaves
        At least one array. All have the same dtype and the same leading axes.
    leading
        The number of leading axes.
    """
    if compat.is_top_level():  # without JAX's slow path for primitives
        return _compiled(_pack_program, list(leaves), leading=leading)[0]
    return pack_p.bind(*leaves, leading=leading)[0]


def unpack(packed: Any, shapes: Sequence[tuple[int, ...]], leading: int = 0) -> list[Any]:
    """Return the arrays that `pack` has packed, with these shapes after the leading axes."""
    if compat.is_top_level():
        return _compiled(_unpack_program, packed, shapes=tuple(shapes), leading=leading)
    return unpack_p.bind(packed, shapes=tuple(shapes), leading=leading)


pack_p, unpack_p = Primitive("mpigrad_pack"), Primitive("mpigrad_unpack")
pack_p.multiple_results = unpack_p.multiple_results = True


def _packed_aval(*leaves: Any, leading: int) -> list[ShapedArray]:
    size = sum(math.prod(x.shape[leading:]) for x in leaves)
    return [ShapedArray((*leaves[0].shape[:leading], size), leaves[0].dtype)]


def _leaf_avals(packed: Any, *, shapes: Any, leading: int) -> list[ShapedArray]:
    lead = packed.shape[:leading]
    return [ShapedArray((*lead, *shape), packed.dtype) for shape in shapes]


pack_p.def_abstract_eval(_packed_aval)
unpack_p.def_abstract_eval(_leaf_avals)


# ---- outside of transformations: a small program, kept by JAX ----


@functools.partial(jax.jit, static_argnames="leading")
def _pack_program(leaves: Sequence[Any], leading: int) -> list[Any]:
    return pack_p.bind(*leaves, leading=leading)


@functools.partial(jax.jit, static_argnames=("shapes", "leading"))
def _unpack_program(packed: Any, shapes: Any, leading: int) -> list[Any]:
    return unpack_p.bind(packed, shapes=shapes, leading=leading)


def _compiled(program: Callable[..., Any], *args: Any, **params: Any) -> Any:
    with without_carriers():  # one program for all transformations
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            with jax.disable_jit(False):
                return program(*args, **params)
        return program(*args, **params)


pack_p.def_impl(lambda *leaves, leading: _compiled(_pack_program, list(leaves), leading=leading))
unpack_p.def_impl(lambda packed, **params: _compiled(_unpack_program, packed, **params))


# ---- derivatives: both maps are linear, and each is the transpose of the other ----


def _shapes(leaves: Sequence[Any], leading: int) -> tuple[tuple[int, ...], ...]:
    return tuple(x.shape[leading:] for x in leaves)


@functools.partial(jax.jit, static_argnames=("shapes", "dtype", "leading"))
def _pack_with_zeros(leaves: Sequence[Any], shapes: Any, dtype: Any, leading: int) -> Any:
    """Return `pack(leaves)`, with zeros in place of the leaves that are None."""
    filled = [jnp.zeros(s, dtype) if x is None else x for x, s in zip(leaves, shapes, strict=True)]
    return pack(filled, leading)


def _pack_nonzero(leaves: Sequence[Any], shapes: Any, dtype: Any, leading: int) -> Any:
    if not any(type(x) is ad.Zero for x in leaves):
        return pack(leaves, leading)
    operands = [None if type(x) is ad.Zero else x for x in leaves]
    with without_carriers():
        return _pack_with_zeros(operands, shapes=shapes, dtype=dtype, leading=leading)


def _pack_jvp(primals: Any, tangents: Any, *, leading: int) -> Any:
    y = pack_p.bind(*primals, leading=leading)
    if all(type(t) is ad.Zero for t in tangents):
        return y, [ad.Zero(jax.typeof(v).to_tangent_aval()) for v in y]
    avals = [jax.typeof(x) for x in primals]
    return y, [_pack_nonzero(tangents, _shapes(avals, 0), avals[0].dtype, leading)]


def _pack_transpose(cotangents: Any, *leaves: Any, leading: int) -> Any:
    (ct,) = cotangents
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in leaves]
    if type(ct) is ad.Zero:
        parts = [ad.Zero(aval) for aval in avals]
    else:
        parts = unpack(ct, _shapes(avals, leading), leading)
    return [p if ad.is_undefined_primal(x) else None for p, x in zip(parts, leaves, strict=True)]


def _unpack_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    y = unpack_p.bind(*primals, **params)
    if type(tangents[0]) is ad.Zero:
        return y, [ad.Zero(jax.typeof(v).to_tangent_aval()) for v in y]
    return y, unpack_p.bind(*tangents, **params)


def _unpack_transpose(cotangents: Any, packed: Any, *, shapes: Any, leading: int) -> Any:
    aval = packed.aval
    if all(type(ct) is ad.Zero for ct in cotangents):
        return [ad.Zero(aval)]
    whole = _shapes(_leaf_avals(aval, shapes=shapes, leading=leading), 0)
    return [_pack_nonzero(cotangents, whole, aval.dtype, leading)]


ad.primitive_jvps[pack_p] = _pack_jvp
ad.primitive_jvps[unpack_p] = _unpack_jvp
ad.primitive_transposes[pack_p] = _pack_transpose
ad.primitive_transposes[unpack_p] = _unpack_transpose


# ---- a batch axis is one more leading axis ----


def _pack_batch(leaves: Any, dims: Any, *, leading: int) -> Any:
    n = next(x.shape[d] for x, d in zip(leaves, dims, strict=True) if d is not None)
    batched = [
        jnp.broadcast_to(x, (n, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(leaves, dims, strict=True)
    ]
    return pack_p.bind(*batched, leading=leading + 1), [0]


def _unpack_batch(operands: Any, dims: Any, *, shapes: Any, leading: int) -> Any:
    packed = jnp.moveaxis(operands[0], dims[0], 0)
    y = unpack_p.bind(packed, shapes=shapes, leading=leading + 1)
    return y, [0] * len(y)


batching.primitive_batchers[pack_p] = _pack_batch
batching.primitive_batchers[unpack_p] = _unpack_batch


# ---- lowering: on CPUs one native copy, elsewhere slices and a concatenation ----


def _concatenate(*leaves: Any, leading: int) -> list[Any]:
    lead = leaves[0].shape[:leading]
    flat = [x.reshape(*lead, math.prod(x.shape[leading:])) for x in leaves]
    return [jnp.concatenate(flat, axis=leading)]


def _slices(packed: Any, *, shapes: Any, leading: int) -> list[Any]:
    sizes, lead = [math.prod(shape) for shape in shapes], packed.shape[:leading]
    parts = jax.lax.split(packed, sizes, axis=leading)
    return [part.reshape(*lead, *shape) for part, shape in zip(parts, shapes, strict=True)]


def _register(primitive: Primitive, elsewhere: Callable[..., Any]) -> None:
    mlir.register_lowering(primitive, mlir.lower_fun(elsewhere, multiple_results=True))
    target = primitive.name
    # The staged handlers of messages would copy an array of a GPU to the host.
    handler = jax.ffi.pycapsule(getattr(library(), target))
    jax.ffi.register_ffi_target(target, handler, platform="cpu")
    call = jax.ffi.ffi_lowering(target)

    def rule(ctx: Any, *values: Any, leading: int, **params: Any) -> Any:
        rows = math.prod(ctx.avals_in[0].shape[:leading])
        return call(ctx, *values, rows=np.int64(rows))

    mlir.register_lowering(primitive, rule, platform="cpu")


_register(pack_p, _concatenate)
_register(unpack_p, _slices)


# ---- Pytrees as messages: the leaves of one dtype travel in one message ----


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
        kind = f"{type(leaf).__name__} ({str(leaf)[:60]!r})"
        remedy = "To send other Python objects use mpi4py, for example comm.mpi.bcast(...)."
        if isinstance(leaf, np.ndarray):
            kind = f"{type(leaf).__name__} of dtype {leaf.dtype.str}, which JAX does not have,"
            remedy = "Convert it to a dtype of numbers."
            if not leaf.dtype.isnative:
                remedy = 'Change its byte order by x.astype(x.dtype.newbyteorder("=")).'
        raise LeafError(leaf, kind, remedy) from None
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
