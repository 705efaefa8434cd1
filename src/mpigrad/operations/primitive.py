"""The factory of differentiable operations.

An operation is a linear map on the product space of the ranks' arrays. Its row names the native
handler, the shape of the result and the transpose. From the row follow the rules of the JAX
primitive: abstract evaluation, lowering, jvp, linearization, transpose and batching.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import adjoint_space, tangent_space
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations import _jax_staging as staging
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir
from mpigrad.operations.carrier import check_allowed, opaque_zero, tie
from mpigrad.operations.jit import jit
from mpigrad.operations.native_targets import register_target
from mpigrad.runtime.call_sites import describe
from mpigrad.runtime.native import ARITHMETIC_DTYPES

__all__ = [
    "check_arithmetic",
    "effect_primitive",
    "linear_map",
    "map_with_tangent",
    "run_eagerly",
    "weighted_map",
]


@functools.cache
def _eager(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return _program(primitive, params)


def _program(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    constant = np.float32(0)
    return jit(lambda *operands: primitive.bind(*operands, constant, **dict(params)))


def run_eagerly(
    primitive: Primitive, programs: Callable[[dict[str, Any]], dict[Any, Any]] | None = None
) -> None:
    """Outside any transformation, run the primitive as a small compiled program.

    The program is kept by its parameters. The last operand is the carrier, whose value is never
    used.

    Parameters
    ----------
    programs
        Maps the parameters to the dictionary that keeps the programs. Default: they are kept until
        the process ends.
    """

    def run(*operands: Any, **params: Any) -> Any:
        key = tuple(params.items())
        if programs is None:
            program = _eager(primitive, key)
        else:
            cache = programs(params)
            program = cache.get((primitive, key)) or _program(primitive, key)
            cache[primitive, key] = program
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            with jax.disable_jit(False):  # a message must be compiled
                return program(*operands[:-1])
        return program(*operands[:-1])

    compat.run_directly(primitive, run, check_allowed)


def check_arithmetic(name: str, x: Any, site: int) -> None:
    """Raise an error if MPI cannot add this dtype, in the adjoint of a copy for example."""
    if not is_arithmetic(x.dtype):
        raise TypeError(
            f"{name} at {describe(site)}: a sum takes integers, float32/64 and complex64/128, got "
            f"{x.dtype.name}, which MPI cannot add. Convert it first, for example "
            "x.astype('float32')."
        )


@functools.cache
def is_arithmetic(dtype: Any) -> bool:
    """Return True if MPI can add this dtype."""
    return dtype.name in ARITHMETIC_DTYPES


@functools.cache
def is_differentiable(dtype: Any) -> bool:
    """Return True for floating-point and complex dtypes."""
    return jnp.issubdtype(dtype, jnp.inexact)


def _as_array(x: Any) -> Any:
    """Convert a Python number, which jax.jvp and jax.linearize pass on as it is."""
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def _message(
    name: str,
    *,
    result: Callable[..., Any],
    target: str | None = None,
    run: Callable[..., Any] | None = None,
    n_inputs: int = -1,
    n_nondiff: int = 0,
    batched_results: int | None = None,
    in_place: bool = False,
    attributes: Callable[..., dict[str, Any]] | None = None,
    batch_axes: tuple[int, int] = (0, 0),
    batch_params: Callable[[dict[str, Any], int], dict[str, Any]] | None = None,
) -> Primitive:
    """Make a primitive (x, ..., carrier) -> results, without its derivatives."""
    primitive = Primitive(f"mpigrad_{name}")

    def shape_rule(*operands: Any, **params: Any) -> list[ShapedArray]:
        *xs, _ = operands
        y = result(*xs, **params)
        results = y if isinstance(y, list) else [] if y is None else [y]
        return [v if isinstance(v, ShapedArray) else ShapedArray(v.shape, v.dtype) for v in results]

    compat.make_effectful(primitive, shape_rule)
    run_eagerly(primitive)
    if run is None:
        handler = register_target(target or f"mpigrad_{name}")
        aliases = {1: 1} if in_place else None
        rule = compat.lowering(handler, n_inputs, aliases, attributes)
    else:
        rule = mlir.lower_fun(run, multiple_results=True)
    compat.register_lowering(primitive, rule)

    def batch(args: Any, dims: Any, **params: Any) -> Any:
        (*xs, a), (*dxs, da) = args, dims
        n = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
        before, after = batch_axes

        def batched(x: Any, d: int | None) -> Any:
            if d is not None:
                return x if d == before else jnp.moveaxis(x, d, before)
            # The operand of another rank may be batched: send the batch.
            shape = (*x.shape[:before], n, *x.shape[before:])
            return jnp.broadcast_to(jnp.expand_dims(x, before), shape)

        def one(x: Any, d: int | None) -> Any:
            return x if d is None else jnp.moveaxis(x, d, 0)[0]

        if da is not None:
            a = jax.lax.reduce_sum(a, (0,))
        if batch_params is not None:
            params = batch_params(params, n)
        xs = [
            *map(one, xs[:n_nondiff], dxs[:n_nondiff]),
            *map(batched, xs[n_nondiff:], dxs[n_nondiff:]),
        ]
        y = primitive.bind(*xs, a, **params)
        return y, [after if i in range(len(y))[:batched_results] else None for i in range(len(y))]

    staging.always_stage(primitive)
    batching.primitive_batchers[primitive] = batch
    return primitive


def _set_derivative(
    primitive: Primitive,
    residuals: Callable[..., Sequence[Any]],
    tangent: Callable[..., Sequence[Any]],
    inactive: Callable[[Any, Any], Any] = opaque_zero,
) -> None:
    """Set the rules of jvp and linearize, with the arguments of `map_with_tangent`."""

    def tangent_of(aval: Any, tx: Any, ta: Any) -> Any:
        if not is_differentiable(aval.dtype):  # integers next to differentiable operands
            return jnp.zeros(aval.shape, aval.dtype)
        if type(tx) is ad.Zero and type(ta) is ad.Zero:  # another operand is active
            return jnp.zeros(aval.shape, aval.dtype)
        if type(tx) is ad.Zero:  # inactive here, perhaps active elsewhere: send a zero
            return inactive(ta, aval)
        if type(ta) is not ad.Zero:  # loops may give it a tangent that is constantly zero
            return tie(tx, ta)
        return tx

    def apply(
        avals: Any, res: Sequence[Any], txs: Any, ta: Any, results: Any, params: Any
    ) -> Sequence[Any]:
        *res, link = res
        txs = [tangent_of(aval, tx, ta) for aval, tx in zip(avals, txs, strict=True)]
        tangents = tangent(res, txs, link, **params)
        tangents = [*tangents, *[None] * (len(results) - len(tangents))]
        return [
            ad.Zero(v.to_tangent_aval()) if t is None or not is_differentiable(v.dtype) else t
            for t, v in zip(tangents, results, strict=True)
        ]

    # The carrier of the tangent depends on x, so that it is active if x is.
    def link_carrier(xs: Any, a: Any) -> Any:
        for x in xs:
            a = tie(a, x) if is_differentiable(x.dtype) else a
        return a

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        (*xs, a), (*txs, ta) = primals, tangents
        xs = list(map(_as_array, xs))
        y = primitive.bind(*xs, a, **params)
        if not any(is_differentiable(x.dtype) for x in xs):
            return y, [ad.Zero(compat.tangent_aval(v)) for v in y]
        res = [*residuals(*xs, a, y, **params), link_carrier(xs, a)]
        avals, results = [jax.typeof(x) for x in xs], [jax.typeof(v) for v in y]
        return y, apply(avals, res, txs, ta, results, params)

    def linearize(is_vjp: Any, nonzeros: Any, *primals: Any, **params: Any) -> Any:
        *xs, a = primals
        xs = list(map(_as_array, xs))
        y = primitive.bind(*xs, a, **params)
        if not any(is_differentiable(x.dtype) for x in xs):
            zeros = [ad.Zero(compat.tangent_aval(v)) for v in y]
            return y, [False] * len(y), [], lambda residuals, *tangents: zeros
        res = [*residuals(*xs, a, y, **params), link_carrier(xs, a)]
        avals, results = [jax.typeof(x) for x in xs], [jax.typeof(v) for v in y]
        active = [is_differentiable(v.dtype) for v in y]

        def linear(res: Any, *tangents: Any) -> Any:
            *txs, ta = tangents
            return apply(avals, res, txs, ta, results, params)

        return y, active, res, linear

    ad.primitive_jvps[primitive] = jvp
    compat.set_linearization(primitive, linearize)


def linear_map(
    name: str,
    *,
    transpose: Callable[..., Any],
    n_ary: bool = False,
    separate_tags: bool = False,
    n_nondiff: int = 0,
    inactive: Callable[[Any, Any], Any] = opaque_zero,
    **options: Any,
) -> Primitive:
    """Make a linear primitive (x, ..., carrier) -> [y, ...] for the handler `mpigrad_<name>`.

    Most such primitives have one operand and at most one result.

    Parameters
    ----------
    transpose
        (cotangent or None, operands before x, aval of x, carrier, **params) -> cotangent of x. With
        `n_ary`: (cotangents, avals of the x, carrier, **params) -> cotangents of the x.
    n_ary
        True for any number of operands and results. Integers among them are zeros in derivatives.
    n_nondiff
        The number of integer operands before x in which the map is not linear. A batch has one
        value of each.
    batched_results
        The number of results that have a batch axis. Default: all.
    result
        (shapes of the x, **params) -> shape and dtype of y, or a list of them, or None if this rank
        gets no result.
    run
        (x, ..., carrier, **params) -> [y, ...] with messages of its own, in place of the handler.
    n_inputs
        The number of operands that the handler reads. It is 0 for a receive, which uses only the
        shape of x. Default: -1, all operands.
    in_place
        True if y may take the memory of x.
    attributes
        (avals, params) -> attributes of the handler. Default: the parameters.
    batch_axes
        The position of a batch axis in x and in y. Default: (0, 0).
    batch_params
        (params, batch size) -> params of the batched operation.
    separate_tags
        True if derivatives travel in their own message space: for messages between two ranks, which
        a wildcard receive of the program might take.
    inactive
        (tangent of the carrier, aval) -> the tangent of an x that is inactive on this rank.
    """

    def tangent(constants: Any, txs: Any, a: Any, **params: Any) -> Sequence[Any]:
        if separate_tags:
            params = {**params, "comm": tangent_space(params["comm"])}
        return primitive.bind(*constants, *txs[n_nondiff:], a, **params)

    def transpose_rule(cotangents: Any, *operands: Any, **params: Any) -> list[Any]:
        constants, xs, a = operands[:n_nondiff], operands[n_nondiff:-1], operands[-1]
        avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in xs]
        params = {**params, "site": -abs(params["site"])}
        if separate_tags:
            params["comm"] = adjoint_space(params["comm"])
        if not n_ary:
            cts = [ad.instantiate_zeros(ct) for ct in cotangents]
            back = transpose(cts[0] if cts else None, *constants, avals[0], a, **params)
            return [*(None for _ in constants), back, None]
        cts = [
            ad.instantiate_zeros(ct) if is_differentiable(y.dtype) else jnp.zeros(y.shape, y.dtype)
            for ct, y in zip(cotangents, options["result"](*avals, **params), strict=True)
        ]
        pairs = zip(xs, transpose(cts, avals, a, **params), strict=True)
        return [*(ct if ad.is_undefined_primal(x) else None for x, ct in pairs), None]

    primitive = map_with_tangent(
        name,
        residuals=lambda *operands, **params: operands[:n_nondiff],
        tangent=tangent,
        inactive=inactive,
        n_nondiff=n_nondiff,
        **options,
    )
    ad.primitive_transposes[primitive] = transpose_rule
    return primitive


def map_with_tangent(
    name: str,
    *,
    residuals: Callable[..., Sequence[Any]],
    tangent: Callable[..., Sequence[Any]],
    inactive: Callable[[Any, Any], Any] = opaque_zero,
    **options: Any,
) -> Primitive:
    """Make a primitive (x, ..., carrier) -> [y, ...] whose tangents are messages of another kind.

    Parameters
    ----------
    residuals
        (x, ..., carrier, results, **params) -> the values that the derivative at x needs.
    tangent
        (residuals, tangents of the x, carrier, **params) -> tangents of the first results. The
        other results are not differentiated. It is linear, and its messages have transposes.
    options
        As for `linear_map`, and `target`, the name of the native handler.
    """
    primitive = _message(name, **options)
    _set_derivative(primitive, residuals, tangent, inactive)
    return primitive


def weighted_map(
    name: str,
    *,
    weight: Callable[..., Any],
    total: Callable[..., Any],
    **options: Any,
) -> Primitive:
    """Make a primitive (x, carrier) -> [y, ...] that is elementwise in all ranks' x, not linear.

    Parameters
    ----------
    weight
        (x, carrier, results, **params) -> dy/dx for this rank's x, from differentiable messages.
        Results after y are not differentiated.
    total
        (weighted tangent, carrier, **params) -> tangent of y: the linear map that adds the weighted
        tangents of all ranks.
    options
        As for `linear_map`, and `target`, the name of the native handler.
    """
    return map_with_tangent(
        name,
        residuals=lambda x, a, y, **params: [weight(x, a, y, **params)],
        tangent=lambda res, txs, a, **params: [total(res[0] * txs[0], a, **params)],
        **options,
    )


def effect_primitive(
    name: str, *, operands: int, batch: Callable[..., Any], target: str | None = None
) -> Primitive:
    """Make a primitive without results and derivative that keeps its place among the messages.

    Parameters
    ----------
    operands
        The number of operands that the handler reads.
    batch
        (args, dims, params) -> the operands of one unbatched call for the whole batch.
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
    staging.always_stage(primitive)
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        primitive.bind(*batch(args, dims, params), **params),
        [],
    )
    return primitive
