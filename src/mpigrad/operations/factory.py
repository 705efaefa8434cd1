"""The factory of differentiable operations.

An operation is a linear map on the product space of the ranks' arrays. Its row names the native
handler, the shape of the result and the transpose; from it follow the JAX primitive's abstract
evaluation, lowering, jvp, linearization, transpose and batching.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import derivative_slot
from mpigrad.native import ARITHMETIC_DTYPES, MAX_COUNT, library, words_per_element
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching
from mpigrad.operations.activity import CARRIER, nought
from mpigrad.operations.sites import describe

__all__ = [
    "check_arithmetic",
    "check_count",
    "effect_primitive",
    "linear_map",
    "register_target",
    "run_eagerly",
    "weighted_map",
]

compat.install_repairs()


def register_target(name: str, lib: Any = None) -> str:
    """Make the native handler `name` known to XLA, on CPUs and (staged in host memory) on GPUs."""
    handler = getattr(library() if lib is None else lib, name)
    staged = library().mpigrad_staged(ctypes.cast(handler, ctypes.c_void_p), name.encode())
    if not staged:
        raise RuntimeError("mpigrad: native/communication/staging.cc has no place left: kTargets")
    compat.register_target(name, handler, staged)
    return name


# `mpigrad.jit` puts its cheap dispatch here (transformations stand above operations).
_jit: Callable[..., Any] = jax.jit


def set_jit(jit: Callable[..., Any]) -> None:
    global _jit
    _jit = jit
    _eager.cache_clear()


@functools.cache
def _eager(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return _program(primitive, params)


def _program(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    constant = np.float32(0)
    return _jit(lambda *operands: primitive.bind(*operands, constant, **dict(params)))


def run_eagerly(
    primitive: Primitive, programs: Callable[[dict[str, Any]], dict[Any, Any]] | None = None
) -> None:
    """Outside any transformation the primitive is a small compiled program, kept by parameters.

    The last operand is the carrier, whose value is never used. `programs` makes, of the parameters,
    the dictionary that keeps the programs, where they should not be kept for ever.
    """

    def run(*operands: Any, **params: Any) -> Any:
        key = tuple(params.items())
        if programs is None:
            program = _eager(primitive, key)
        else:
            kept = programs(params)
            program = kept.get((primitive, key)) or _program(primitive, key)
            kept[primitive, key] = program
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            with jax.disable_jit(False):  # a message is compiled all the same
                return program(*operands[:-1])
        return program(*operands[:-1])

    compat.run_directly(primitive, run)


def check_count(name: str, shape: Sequence[int], dtype: Any) -> None:
    """Refuse messages that MPI's 32-bit counts cannot hold."""
    count = math.prod(shape) * words_per_element(np.dtype(dtype))
    if count > MAX_COUNT:
        raise ValueError(
            f"{name}: a message of {math.prod(shape)} elements of {dtype} is longer than MPI's "
            f"counts of 32 bits allow ({MAX_COUNT} words of at most 8 bytes); send it in parts"
        )


def check_arithmetic(name: str, x: Any, site: int) -> None:
    """Refuse sums of what MPI cannot add: the adjoints of copies, too, where it moved as it is."""
    if x.dtype.name not in ARITHMETIC_DTYPES:
        raise TypeError(
            f"{name} at {describe(site)}: MPI cannot add {x.dtype.name}; convert it first, for "
            "instance x.astype('float32')"
        )


def is_differentiable(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _message(
    name: str,
    *,
    result: Callable[..., ShapedArray | None],
    target: str | None = None,
    takes_data: bool = True,
    in_place: bool = False,
    attributes: Callable[..., dict[str, Any]] | None = None,
    batch_axes: tuple[int, int] = (0, 0),
    batch_params: Callable[[dict[str, Any], int], dict[str, Any]] | None = None,
) -> Primitive:
    """A primitive (x, carrier) -> results: all but its derivatives."""
    primitive = Primitive(f"mpigrad_{name}")
    handler = register_target(target or f"mpigrad_{name}")

    def shape_rule(x: Any, a: Any, **params: Any) -> list[ShapedArray]:
        y = result(x, **params)
        results = y if isinstance(y, list) else [] if y is None else [y]
        for aval in (x, *results):
            check_count(name, aval.shape, aval.dtype)
        return results

    compat.make_effectful(primitive, shape_rule)
    run_eagerly(primitive)
    aliases = {1: 1} if in_place else None
    rule = compat.lowering(handler, int(takes_data), aliases, attributes)
    compat.register_lowering(primitive, rule)

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

    compat.always_stage(primitive)
    batching.primitive_batchers[primitive] = batch
    return primitive


def _set_derivative(
    primitive: Primitive,
    at: Callable[..., Sequence[Any]],
    tangent: Callable[..., Sequence[Any]],
    inactive: Callable[[Any, Any], Any] = nought,
) -> None:
    """Set the rules of jvp and linearize.

    Parameters
    ----------
    at
        (x, carrier, results, **params) -> what the derivative at x needs.
    tangent
        (what `at` gives, tangent of x, carrier, **params) -> tangents of the results, of the first
        ones where the others have none; linear.
    inactive
        (tangent of the carrier, aval) -> the tangent of an x that is inactive on this rank.
    """

    def apply(
        aval: Any, known: Sequence[Any], tx: Any, ta: Any, results: Any, params: Any
    ) -> Sequence[Any]:
        if type(tx) is ad.Zero:  # inactive here, perhaps active elsewhere: send a zero
            tx = inactive(ta, aval)
        elif type(ta) is not ad.Zero:  # loops may give it a tangent that is constantly zero
            tx = tx + nought(ta, aval)
        *known, link = known
        tangents = tangent(known, tx, link, **params)
        return [*tangents, *(ad.Zero(v.to_tangent_aval()) for v in results[len(tangents) :])]

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        (x, a), (tx, ta) = primals, tangents
        y = primitive.bind(x, a, **params)
        if not is_differentiable(x.dtype):
            return y, [ad.Zero(compat.tangent_aval(v)) for v in y]
        # The tangent's carrier depends on x, so that it is active wherever x is.
        known = [*at(x, a, y, **params), a + nought(x, CARRIER)]
        return y, apply(jax.typeof(x), known, tx, ta, [jax.typeof(v) for v in y], params)

    def linearize(is_vjp: Any, nonzeros: Any, x: Any, a: Any, **params: Any) -> Any:
        y = primitive.bind(x, a, **params)
        if not is_differentiable(x.dtype):
            zeros = [ad.Zero(compat.tangent_aval(v)) for v in y]
            return y, [False] * len(y), [], lambda residuals, tx, ta: zeros
        known, aval = [*at(x, a, y, **params), a + nought(x, CARRIER)], jax.typeof(x)
        results = [jax.typeof(v) for v in y]
        active = [is_differentiable(v.dtype) for v in y]
        return y, active, known, lambda known, tx, ta: apply(aval, known, tx, ta, results, params)

    ad.primitive_jvps[primitive] = jvp
    compat.set_linearization(primitive, linearize)


def linear_map(
    name: str,
    *,
    transpose: Callable[..., Any],
    own_space: bool = False,
    inactive: Callable[[Any, Any], Any] = nought,
    **options: Any,
) -> Primitive:
    """A primitive (x, carrier) -> [y] or [] for the native handler `mpigrad_<name>`.

    Parameters
    ----------
    transpose
        (cotangent or None, aval of x, carrier, **params) -> cotangent of x.
    result
        (aval of x, **params) -> aval of y, or None where nothing comes back on this rank.
    takes_data
        Whether the handler reads x (a receive only takes its shape). Default: yes.
    in_place
        Whether y may take the memory of x. Default: no.
    attributes
        (avals, params) -> attributes of the handler; default: the parameters.
    batch_axes
        Where a batch axis stands in x and in y. Default: (0, 0).
    batch_params
        (params, batch size) -> params of the batched operation.
    own_space
        Whether derivatives travel in a message space of their own (messages between two ranks,
        which a wildcard receive might take for one of the program).
    inactive
        (tangent of the carrier, aval) -> the tangent of an x that is inactive on this rank.
    """
    primitive = _message(name, **options)

    def tangent(known: Any, tx: Any, a: Any, **params: Any) -> Sequence[Any]:
        if own_space:
            params = {**params, "comm": derivative_slot(params["comm"])}
        return primitive.bind(tx, a, **params)

    def transpose_rule(cotangents: Any, x: Any, a: Any, **params: Any) -> list[Any]:
        aval = x.aval if ad.is_undefined_primal(x) else jax.typeof(x)
        cts = [ad.instantiate_zeros(ct) for ct in cotangents]
        params = {**params, "site": -abs(params["site"])}
        return [transpose(cts[0] if cts else None, aval, a, **params), None]

    _set_derivative(
        primitive,
        lambda x, a, y, **params: (),
        tangent,
        inactive,
    )
    ad.primitive_transposes[primitive] = transpose_rule
    return primitive


def weighted_map(
    name: str,
    *,
    weight: Callable[..., Any],
    total: Callable[..., Any],
    **options: Any,
) -> Primitive:
    """A primitive (x, carrier) -> [y, ...] that is not linear, elementwise in all ranks' x.

    Parameters
    ----------
    weight
        (x, carrier, results, **params) -> dy/dx of this rank's x, from messages that are
        differentiable. Results after y have no derivative.
    total
        (weighted tangent, carrier, **params) -> tangent of y: the linear map that adds them up.
    options
        As for `linear_map`, and `target`, the name of the native handler.
    """
    primitive = _message(name, **options)
    _set_derivative(
        primitive,
        lambda x, a, y, **params: [weight(x, a, y, **params)],
        lambda known, tx, a, **params: [total(known[0] * tx, a, **params)],
    )
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
    compat.register_lowering(primitive, compat.lowering(handler, operands))

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
