"""The factory of primitives that a JAX program or a native handler computes as a whole.

A message is a linear map (`linear_map` in primitive.py). A solve, a simulation or a sparse product
is one primitive, too: JAX does not look into it, and its derivative is another computation, not the
derivative of its steps. The functions given to `primitive` are all that its derivatives need. They
handle arrays only: the tangent of an inactive operand is None, and a linear operand is its shape
and dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpigrad.operations import _jax_compat as compat
from mpigrad.operations import _jax_staging as staging
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir
from mpigrad.operations.native_targets import register_target
from mpigrad.operations.primitive import run_eagerly

__all__ = ["Activity", "NativeCall", "primitive"]


@dataclass(frozen=True)
class NativeCall:
    """A call of a native handler, which XLA's foreign function interface makes.

    Attributes
    ----------
    target
        The name of the handler.
    n_inputs
        The number of operands that the handler reads. Default: all, without the carrier.
    library
        Returns the library of the handler, loaded by `ctypes`. Default: that of mpigrad's messages.
    attributes
        Maps the parameters of the primitive to the attributes of the handler. Default: all of them.
    keep_alive
        The name of a parameter that lives at least as long as each compiled program.
    dtypes
        The dtypes of the first operand that the handler takes. `run` computes the others. Default:
        all.
    """

    target: str
    n_inputs: int | None = None
    library: Callable[[], Any] | None = None
    attributes: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    keep_alive: str | None = None
    dtypes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Activity:
    """The use of a derivative, on which its residuals depend.

    Attributes
    ----------
    operands
        True for each operand that has a tangent on this rank.
    reverse
        True if the tangent map will be transposed.
    """

    operands: tuple[bool, ...]
    reverse: bool


Differentiate = Callable[
    [Sequence[Any], dict[str, Any], Activity],
    tuple[Sequence[Any], Any, Callable[[Any, Sequence[Any]], Sequence[Any]]],
]
Transpose = Callable[
    [Sequence[Any], Sequence[Any], tuple[bool, ...], dict[str, Any]], Sequence[Any]
]
Batch = Callable[[Sequence[Any], Sequence[Any], dict[str, Any]], tuple[Sequence[Any], Any]]


def primitive(
    name: str,
    *,
    shapes: Callable[..., Sequence[Any]],
    run: Callable[..., Any] | None = None,
    native: NativeCall | None = None,
    messages: bool = True,
    impl: Callable[..., Any] | None = None,
    programs: Callable[[dict[str, Any]], dict[Any, Any]] | None = None,
    differentiate: Differentiate | Literal["linear"] | None = None,
    undifferentiated: Sequence[int] = (),
    transpose: Transpose | None = None,
    batch: Batch | Literal["map", "unroll"] | None = None,
    weak: type | None = None,
) -> Primitive:
    """Make a primitive (operands...) -> [results...] with the rules that JAX needs.

    A primitive with messages has the carrier as its last operand, and keeps its place in the order
    of the program's messages.

    Parameters
    ----------
    name
        The name in the text of programs, without the prefix `mpigrad_`.
    shapes
        (shapes of the operands, **params) -> a list of the shapes and dtypes of the results.
    run
        (operands, **params) -> the results, in JAX.
    native
        The native handler that computes the results. With `run` and without messages: on CPUs only.
    messages
        True if the computation exchanges messages. `params` then has `site`, the call site, which
        is negative in the adjoint.
    impl
        (operands, **params) -> the results outside of all transformations. Default: a compiled
        program.
    programs
        Maps the parameters to the dictionary that keeps these programs. Default: with messages,
        each call compiles again, because functions among the parameters may close over anything;
        without messages they are kept until the process ends.
    differentiate
        (operands, params, activity) -> the results, a pytree of residuals, and the tangent map
        (residuals, tangents of the operands) -> tangents of the results, which is linear. The
        tangent of an operand that is inactive on this rank is None. So is the tangent of a result
        that is not differentiated. "linear": the primitive is linear in all operands at once.
    undifferentiated
        The indices of results without tangents.
    transpose
        (cotangents, operands, linear, params) -> a cotangent for each operand. `linear` is True for
        operands in which the primitive is linear here, which are shapes and not values. Cotangents
        of the others are ignored.
    batch
        (operands, axes, params) -> the results of a batch, and their batch axes. "map": one member
        after the other, as a loop; "unroll": the same without a loop.
    weak
        The type of parameters that JAX's caches must not keep alive.
    """
    made = Primitive(f"mpigrad_{name}")

    def shape_rule(*avals: Any, **params: Any) -> list[ShapedArray]:
        return [
            y if isinstance(y, ShapedArray) else ShapedArray(y.shape, y.dtype)
            for y in shapes(*avals, **params)
        ]

    if messages:
        compat.make_effectful(made, shape_rule)
        staging.always_stage(made)
    else:
        made.multiple_results = True
        made.def_abstract_eval(shape_rule)
    if weak is not None:
        compat.hold_weakly(weak)
    _set_evaluation(made, impl, programs, messages)
    _set_lowering(made, run, native, messages)
    if differentiate == "linear":
        ad.primitive_jvps[made] = functools.partial(_linear_jvp, made)
    elif differentiate is not None:
        _set_derivative(made, differentiate, frozenset(undifferentiated), messages)
    if transpose is not None:
        ad.primitive_transposes[made] = _transpose_rule(transpose, frozenset(undifferentiated))
    if batch is not None:
        batching.primitive_batchers[made] = _batch_rule(made, batch)
    return made


# ---- evaluation ----


def _set_evaluation(
    made: Primitive,
    impl: Callable[..., Any] | None,
    programs: Callable[[dict[str, Any]], dict[Any, Any]] | None,
    messages: bool,
) -> None:
    if impl is not None:
        made.def_impl(impl)
    elif messages and programs is not None:
        run_eagerly(made, programs)
    elif messages:
        made.def_impl(lambda *operands, **params: _compiled(made, params)(*operands))
    else:
        made.def_impl(functools.partial(_run_pure, made, programs or (lambda params: _programs)))


_programs: dict[Any, Any] = {}


def _compiled(made: Primitive, params: dict[str, Any]) -> Callable[..., Any]:
    return jax.jit(functools.partial(made.bind, **params))


def _run_pure(
    made: Primitive,
    programs: Callable[[dict[str, Any]], dict[Any, Any]],
    *operands: Any,
    **params: Any,
) -> Any:
    cache, key = programs(params), (made, *params.items())
    if key not in cache:
        cache[key] = _compiled(made, params)
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        with jax.disable_jit(False):
            return cache[key](*operands)
    return cache[key](*operands)


def _set_lowering(
    made: Primitive, run: Callable[..., Any] | None, native: NativeCall | None, messages: bool
) -> None:
    rule = None if run is None else mlir.lower_fun(run, multiple_results=True)
    if rule is not None:
        mlir.register_lowering(made, rule)
    if native is not None and (messages or rule is None):
        compat.register_lowering(made, _native_rule(native, messages))
    elif native is not None:
        mlir.register_lowering(made, _native_rule(native, messages, rule), platform="cpu")


def _native_rule(
    native: NativeCall, messages: bool, otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    def attributes(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
        return params if native.attributes is None else native.attributes(params)

    # A library is loaded when its first program is compiled.
    @functools.cache
    def call() -> Callable[..., Any]:
        library = None if native.library is None else native.library()
        target = register_target(native.target, library)
        if messages:
            n = -1 if native.n_inputs is None else native.n_inputs
            return compat.lowering(target, n, attributes=attributes)
        return compat.pure_lowering(target, native.n_inputs, attributes)

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        if native.dtypes is not None and ctx.avals_in[0].dtype.name not in native.dtypes:
            assert otherwise is not None
            return otherwise(ctx, *operands, **params)
        if native.keep_alive is not None:
            ctx.module_context.add_keepalive(params[native.keep_alive])
        return call()(ctx, *operands, **params)

    return rule


# ---- derivatives ----


def _linear_jvp(made: Primitive, primals: Any, tangents: Any, **params: Any) -> Any:
    results = made.bind(*primals, **params)
    if all(type(t) is ad.Zero for t in tangents):
        return results, [ad.Zero(compat.tangent_aval(y)) for y in results]
    return results, made.bind(*map(ad.instantiate_zeros, tangents), **params)


def _set_derivative(
    made: Primitive, differentiate: Differentiate, undifferentiated: frozenset[int], messages: bool
) -> None:
    def along(tangent: Any, residuals: Any, tangents: Any, avals: Any) -> list[Any]:
        moved = tangent(residuals, [None if type(t) is ad.Zero else t for t in tangents])
        return [ad.Zero(aval) if t is None else t for t, aval in zip(moved, avals, strict=True)]

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        activity = Activity(tuple(type(t) is not ad.Zero for t in tangents), False)
        results, residuals, tangent = differentiate(primals, params, activity)
        avals = [compat.tangent_aval(y) for y in results]
        return results, along(tangent, residuals, tangents, avals)

    def linearize(is_vjp: Any, nonzeros: Any, *primals: Any, **params: Any) -> Any:
        activity = Activity(tuple(map(bool, nonzeros)), bool(is_vjp))
        results, residuals, tangent = differentiate(primals, params, activity)
        avals = [compat.tangent_aval(y) for y in results]
        leaves, structure = jax.tree.flatten(residuals)

        def linear(leaves: Any, *tangents: Any) -> Any:
            return along(tangent, jax.tree.unflatten(structure, leaves), tangents, avals)

        active = [i not in undifferentiated for i in range(len(results))]
        return results, active, leaves, linear

    ad.primitive_jvps[made] = jvp
    if messages:  # JAX would execute the known part of the jvp early
        compat.set_linearization(made, linearize)


def _transpose_rule(transpose: Transpose, undifferentiated: frozenset[int]) -> Callable[..., Any]:
    def rule(cotangents: Any, *operands: Any, **params: Any) -> list[Any]:
        cts = [
            None if i in undifferentiated else ad.instantiate_zeros(ct)
            for i, ct in enumerate(cotangents)
        ]
        linear = tuple(map(ad.is_undefined_primal, operands))
        values = [x.aval if flag else x for x, flag in zip(operands, linear, strict=True)]
        if "site" in params:
            params = {**params, "site": -abs(params["site"])}
        back = transpose(cts, values, linear, params)
        return [ct if flag else None for ct, flag in zip(back, linear, strict=True)]

    return rule


# ---- batches ----


def _batch_rule(made: Primitive, batch: Batch | Literal["map", "unroll"]) -> Callable[..., Any]:
    rules: dict[Any, Any] = {
        "map": functools.partial(_map_members, made),
        "unroll": functools.partial(_unroll_members, made),
    }
    chosen = rules.get(batch, batch)
    return lambda args, dims, **params: chosen(args, dims, params)


def _batch_size(args: Sequence[Any], dims: Sequence[Any]) -> int:
    return next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)


def _map_members(made: Primitive, args: Any, dims: Any, params: dict[str, Any]) -> Any:
    # One after the other, for the whole batch: another rank's operands may be batched.
    n = _batch_size(args, dims)
    mapped = [i for i, d in enumerate(dims[:-1]) if d is not None]
    a = args[-1] if dims[-1] is None else jnp.sum(args[-1])

    def one(member: Any) -> Any:
        operands = [*args[:-1], a]
        for i, value in zip(mapped, member[1], strict=True):
            operands[i] = value
        return made.bind(*operands, **params)

    front = [jnp.moveaxis(args[i], dims[i], 0) for i in mapped]
    results = jax.lax.map(one, (jnp.arange(n), front))
    return results, [0] * len(results)


def _unroll_members(made: Primitive, args: Any, dims: Any, params: dict[str, Any]) -> Any:
    members = [
        made.bind(
            *(
                x if d is None else jax.lax.index_in_dim(x, i, d, keepdims=False)
                for x, d in zip(args, dims, strict=True)
            ),
            **params,
        )
        for i in range(_batch_size(args, dims))
    ]
    stacked = [jnp.stack(results) for results in zip(*members, strict=True)]
    return stacked, [0] * len(stacked)
