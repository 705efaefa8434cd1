"""The factory of differentiable operations.

An operation is a linear map on the product space of the ranks' arrays. Its row names the native
handler, the shape of the result and the transpose; from it follow the JAX primitive's abstract
evaluation, lowering, jvp, linearization, transpose and batching.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import MAX_COUNT, library, words_per_element
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir
from mpigrad.operations.activity import CARRIER, nought

__all__ = ["check_count", "effect_primitive", "linear_map", "register_target", "run_eagerly"]

compat.install_repairs()


def register_target(name: str, lib: Any = None) -> str:
    """Make the native handler `name` known to XLA on CPUs."""
    handler = getattr(library() if lib is None else lib, name)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return name


# `mpigrad.jit` puts its cheap dispatch here (transformations stand above operations).
_jit: Callable[..., Any] = jax.jit


def set_jit(jit: Callable[..., Any]) -> None:
    global _jit
    _jit = jit
    _eager.cache_clear()


@functools.cache
def _eager(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return _jit(lambda *operands: primitive.bind(*operands, **dict(params)))


def run_eagerly(primitive: Primitive) -> None:
    """Outside any transformation the primitive is a small compiled program, kept by parameters."""
    primitive.def_impl(lambda *xs, **params: _eager(primitive, tuple(params.items()))(*xs))


def check_count(name: str, shape: Sequence[int], dtype: Any) -> None:
    """Refuse messages that MPI's 32-bit counts cannot hold."""
    count = math.prod(shape) * words_per_element(np.dtype(dtype))
    if count > MAX_COUNT:
        raise ValueError(
            f"{name}: a message of {math.prod(shape)} elements of {dtype} is longer than MPI's "
            f"counts of 32 bits allow ({MAX_COUNT} words of at most 8 bytes); send it in parts"
        )


def is_differentiable(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def linear_map(
    name: str,
    *,
    result: Callable[..., ShapedArray | None],
    transpose: Callable[..., Any],
    takes_data: bool = True,
    in_place: bool = False,
    attributes: Callable[..., dict[str, Any]] | None = None,
    batch_axes: tuple[int, int] = (0, 0),
    batch_params: Callable[[dict[str, Any], int], dict[str, Any]] | None = None,
) -> Primitive:
    """A primitive (x, carrier) -> [y] or [] for the native handler `mpigrad_<name>`.

    Parameters
    ----------
    result
        (aval of x, **params) -> aval of y, or None where nothing comes back on this rank.
    transpose
        (cotangent or None, aval of x, carrier, **params) -> cotangent of x.
    takes_data
        Whether the handler reads x (a receive only takes its shape).
    in_place
        Whether y may take the memory of x.
    attributes
        (avals, params) -> attributes of the handler; default: the parameters.
    batch_axes
        Where a batch axis stands in x and in y.
    batch_params
        (params, batch size) -> params of the batched operation.
    """
    primitive = Primitive(f"mpigrad_{name}")
    target = register_target(f"mpigrad_{name}")

    def shape_rule(x: Any, a: Any, **params: Any) -> list[ShapedArray]:
        y = result(x, **params)
        for aval in (x, y):
            if aval is not None:
                check_count(name, aval.shape, aval.dtype)
        return [] if y is None else [y]

    compat.make_effectful(primitive, shape_rule)
    run_eagerly(primitive)
    mlir.register_lowering(
        primitive,
        compat.lowering(target, int(takes_data), {1: 1} if in_place else None, attributes),
        platform="cpu",
    )

    def tangent_map(aval: Any, params: dict[str, Any]) -> Callable[[Any, Any, Any], Sequence[Any]]:
        def apply(a: Any, tx: Any, ta: Any) -> Sequence[Any]:
            if type(tx) is ad.Zero:  # inactive here, perhaps active elsewhere: send a zero
                tx = nought(ta, aval)
            elif type(ta) is not ad.Zero:
                tx = tx + nought(ta, aval)
            return primitive.bind(tx, a, **params)

        return apply

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        x, a = primals
        y = primitive.bind(x, a, **params)
        if not is_differentiable(x.dtype):
            return y, [ad.Zero(compat.tangent_aval(v)) for v in y]
        # The tangent's carrier depends on x, so that it is active wherever x is.
        link = a + nought(x, CARRIER)
        return y, tangent_map(jax.typeof(x), params)(link, *tangents)

    def linearize(is_vjp: Any, nonzeros: Any, x: Any, a: Any, **params: Any) -> Any:
        y = primitive.bind(x, a, **params)
        if not is_differentiable(x.dtype):
            zeros = [ad.Zero(compat.tangent_aval(v)) for v in y]
            return y, [False] * len(y), [], lambda residuals, tx, ta: zeros
        link = a + nought(x, CARRIER)
        apply = tangent_map(jax.typeof(x), params)
        return y, [True] * len(y), [link], lambda residuals, tx, ta: apply(residuals[0], tx, ta)

    def transpose_rule(cotangents: Any, x: Any, a: Any, **params: Any) -> list[Any]:
        aval = x.aval if ad.is_undefined_primal(x) else jax.typeof(x)
        cts = [ad.instantiate_zeros(ct) for ct in cotangents]
        params = {**params, "site": -abs(params["site"])}
        return [transpose(cts[0] if cts else None, aval, a, **params), None]

    def batch(args: Any, dims: Any, **params: Any) -> Any:
        (x, a), (dx, da) = args, dims
        n = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
        before, after = batch_axes
        if dx is None:  # another rank's operand may be batched: send the batch
            shape = (*x.shape[:before], n, *x.shape[before:])
            x = jnp.broadcast_to(jnp.expand_dims(x, before), shape)
        else:
            x = jnp.moveaxis(x, dx, before)
        if da is not None:
            a = jnp.sum(a)
        if batch_params is not None:
            params = batch_params(params, n)
        y = primitive.bind(x, a, **params)
        return y, [after] * len(y)

    ad.primitive_jvps[primitive] = jvp
    compat.set_linearization(primitive, linearize)
    compat.always_stage(primitive)
    ad.primitive_transposes[primitive] = transpose_rule
    batching.primitive_batchers[primitive] = batch
    return primitive


def effect_primitive(
    name: str, *, operands: int, batch: Callable[..., Any], target: str | None = None
) -> Primitive:
    """A primitive without results and without a derivative, at its place among the messages.

    `batch(args, dims, params)` gives the operands of the one unbatched call that stands for all.
    """
    primitive = Primitive(f"mpigrad_{name}")
    compat.make_effectful(primitive, lambda *avals, **params: [])
    run_eagerly(primitive)
    handler = register_target(target or f"mpigrad_{name}")
    mlir.register_lowering(primitive, compat.lowering(handler, operands), platform="cpu")

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        return primitive.bind(*primals, **params), []

    def linearize(is_vjp: Any, nonzeros: Any, *primals: Any, **params: Any) -> Any:
        return primitive.bind(*primals, **params), [], [], lambda residuals, *tangents: []

    ad.primitive_jvps[primitive] = jvp
    compat.set_linearization(primitive, linearize)
    compat.always_stage(primitive)
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        primitive.bind(*batch(args, dims, params), **params),
        [],
    )
    return primitive
