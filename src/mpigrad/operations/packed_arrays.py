"""Copies of many arrays into one array and back, as one instruction of a compiled program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir
from mpigrad.operations.carrier import without_carriers
from mpigrad.runtime.native import library

__all__ = ["pack", "unpack"]


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
    given = [None if type(x) is ad.Zero else x for x in leaves]
    with without_carriers():
        return _pack_with_zeros(given, shapes=shapes, dtype=dtype, leading=leading)


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
