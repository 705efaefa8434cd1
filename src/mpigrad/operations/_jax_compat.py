"""The parts of JAX that make a message an ordered, differentiable operation.

Private names are in one table (`_jax_private.py`), repairs of JAX's rules in `_jax_repairs.py`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.interpreters import ad as _ad
from jax.interpreters import batching, mlir

from mpigrad.operations._jax_private import (
    VERSION,
    UnsupportedJAXError,
    optional,
    private,
    refuse,
)

__all__ = [
    "ClosedJaxpr",
    "Jaxpr",
    "Primitive",
    "ShapedArray",
    "ad",
    "allow_in_custom_rules",
    "batching",
    "concrete_value",
    "configure_backend",
    "constants_as_operands",
    "effect",
    "has_messages",
    "hold_weakly",
    "in_custom_function",
    "in_custom_gradient",
    "in_lineax_operator",
    "is_batched",
    "is_top_level",
    "lower_high_level",
    "lower_in_token_region",
    "lower_to_nothing",
    "lowering",
    "make_effectful",
    "mlir",
    "other_orders",
    "pure_lowering",
    "queues",
    "register_lowering",
    "register_target",
    "run_directly",
    "set_linearization",
    "tangent_aval",
    "visible",
]

ShapedArray = jax.core.ShapedArray
ad: Any = _ad  # untyped: JAX does not export the attributes that are used here
_trace_context = private("core.trace_ctx")
_eval_trace = private("core.eval_trace")
_ArrayImpl = optional("array.ArrayImpl")
# Public since JAX 0.10 in jax.extend.core, before in jax.core.
_Effect: Any = getattr(jax.extend.core, "Effect", None) or jax.core.Effect


class MPIEffect(_Effect):
    """The ordered effect of all messages of a process, which keep the order of the program."""

    def __str__(self) -> str:
        return "MPI"

    def __repr__(self) -> str:  # the key of a KeyError if a function hides its messages from JAX
        return (
            "mpigrad: expected no messages in an operator of lineax.linear_solve or a function of "
            "jax.custom_batching.custom_vmap or jax.shard_map, which JAX compiles as functions "
            "without effects, got one. Use mpigrad.sparse.solve or jax.lax.custom_linear_solve, "
            "mpigrad.vmap, and messages outside of shard_map."
        )

    def __hash__(self) -> int:
        return hash(MPIEffect)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MPIEffect)


effect = MPIEffect()
# Without the last kind, `grad` of an unused receive is silently zero.
for _kinds in ("ordered_effects", "lowerable_effects", "partial_eval_kept_effects"):
    private(f"effects.{_kinds}").add_type(MPIEffect)
for _kinds, _features in {
    "control_flow_allowed_effects": ("jax.lax.cond", "jax.lax.scan", "jax.lax.while_loop"),
    "remat_allowed_effects": ("jax.checkpoint",),
}.items():
    try:
        private(f"effects.{_kinds}").add_type(MPIEffect)
    except UnsupportedJAXError as _error:  # JAX itself refuses messages there
        for _feature in _features:
            refuse(_feature, str(_error))


def allow_in_custom_rules() -> None:
    """Let functions with custom rules have messages."""
    private("effects.custom_derivatives_allowed_effects").add_type(MPIEffect)


def has_messages(kinds: Any) -> bool:
    """Return True if one of these effects is that of a message."""
    return any(isinstance(kind, MPIEffect) for kind in kinds)


def other_orders(kinds: Any) -> list[str]:
    """Return the names of ordered effects other than that of messages."""
    ordered = [k for k in kinds if private("effects.ordered_effects").contains(k)]
    return sorted({str(k) for k in ordered if not isinstance(k, MPIEffect)})


def make_effectful(primitive: Primitive, shape_rule: Callable[..., Sequence[ShapedArray]]) -> None:
    """Give `primitive` the ordered effect, and the rule that returns the avals of its results."""
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(
        lambda *avals, **params: (list(shape_rule(*avals, **params)), {effect})
    )


def set_linearization(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Set the rule by which `primitive` is linearized.

    It maps (is_vjp, nonzeros, *primals) to (results, nonzeros, known, linear).

    JAX 0.8 does not tell if the derivative will be transposed: the rule then assumes it. Since JAX
    0.11.1 a rule also returns structured residuals, which `linear` takes.
    """

    def without_purpose(*args: Any, **params: Any) -> Any:
        return rule(True, *args, **params)

    def with_structured_residuals(*args: Any, **params: Any) -> Any:
        results, nonzeros, known, linear = rule(*args, **params)
        return results, nonzeros, known, None, lambda res, _, *tangents: linear(res, *tangents)

    adapted = without_purpose if VERSION < (0, 9) else rule
    linearizations = private("interpreters.ad.primitive_linearizations")
    linearizations[primitive] = adapted if VERSION < (0, 11, 1) else with_structured_residuals


def tangent_aval(x: Any) -> Any:
    """Return the aval of the tangent of `x` (float0 for integers)."""
    return jax.typeof(x).to_tangent_aval()


def concrete_value(x: Any) -> Any:
    """Return the value of a tracer of a derivative, None if it has no value, or `x` itself."""
    return x.to_concrete_value() if isinstance(x, jax.core.Tracer) else x


def is_top_level() -> bool:
    """Return True if no transformation and no trace is active."""
    return _trace_context.trace is _eval_trace


def hold_weakly(kind: type) -> None:
    """Let JAX's cache of abstract evaluations hold parameters of this type by weak references."""
    kinds = optional("util.weakref_cache_key_types")
    if kinds is not None:
        kinds.add(kind)


def run_directly(
    primitive: Primitive, run: Callable[..., Any], check: Callable[[dict[str, Any]], None]
) -> None:
    """Outside any trace, evaluate `primitive` by `run`, without JAX's slow path for arrays.

    In a trace, `check(params)` raises an error if a message is not allowed there.
    """
    primitive.def_impl(run)
    plain = primitive.bind

    def bind(*operands: Any, **params: Any) -> Any:
        if _trace_context.trace is _eval_trace:
            for x in operands:
                if type(x) is not _ArrayImpl and type(x) is not np.float32:
                    break
            else:
                return run(*operands, **params)
        else:
            check(params)
        return plain(*operands, **params)

    primitive.bind = bind


def is_batched(x: Any) -> bool:
    """Return True if `x` is an operand of the enclosing `vmap` with its batch axis."""
    return isinstance(x, private("interpreters.batching.BatchTracer"))


def visible(tracer: Any) -> bool:
    """Return True if the trace that made `tracer` is the current trace or below it."""
    trace = _trace_context.trace
    while trace is not None and trace is not _eval_trace:
        if trace is tracer._trace:
            return True
        try:
            trace = trace.parent_trace
        except AttributeError as error:  # if ignored, messages would be constant on some ranks
            raise UnsupportedJAXError(
                "mpigrad: transformations of messages need the attribute parent_trace of JAX's "
                f"traces, which a {type(trace).__name__} of JAX {jax.__version__} does not have. "
                "Install a JAX that mpigrad was tested with (docs/jax_versions.md)."
            ) from error
    return False


# The code of jax.custom_gradient that evaluates its rule.
_GRADIENT_RULE = "custom_gradient.<locals>.bwd"


def _on_the_stack(is_it: Callable[[Any], bool]) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if is_it(frame.f_code):
            return True
        frame = frame.f_back
    return False


def in_custom_gradient() -> bool:
    """Return True while the rule of a jax.custom_gradient is evaluated."""
    return _on_the_stack(lambda code: code.co_qualname == _GRADIENT_RULE)


def in_lineax_operator() -> bool:
    """Return True while an operator of lineax is evaluated, or its matrix is built."""
    return _on_the_stack(lambda code: code.co_filename.endswith("/lineax/_operator.py"))


def in_custom_function() -> bool:
    """Return True while a function with a custom rule, or the rule, is traced or evaluated."""
    return _on_the_stack(lambda code: code.co_filename.endswith("/custom_derivatives.py"))


# ---- lowering ----

# The platforms of native handlers: JAX's name -> XLA's name.
_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA", "rocm": "ROCM"}
# For tests: copy arrays on CPUs as arrays on GPUs of this platform are copied.
_STAGED_AS = _PLATFORMS.get(os.environ.get("MPIGRAD_STAGE", ""), "")


def register_target(name: str, handler: Any, staged: Callable[[str], Any]) -> None:
    """Register a handler with XLA: `handler` for CPUs, `staged(platform)` for GPUs."""
    for platform in _PLATFORMS.values():
        on_gpu = _STAGED_AS if platform == "cpu" else platform
        function = staged(on_gpu) if on_gpu else handler
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform=platform)


def register_lowering(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Set the lowering of `primitive` on all platforms of native handlers."""
    for platform in _PLATFORMS:
        mlir.register_lowering(primitive, rule, platform=platform)


def _attribute(value: Any) -> Any:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return np.int64(value)
    if isinstance(value, tuple):
        return np.asarray(value, np.int64)
    return value


def _on_gpu(ctx: Any) -> bool:
    platforms = getattr(ctx, "platforms", None) or ctx.module_context.platforms
    return any(platform != "cpu" for platform in platforms)


def _behind_barriers(ctx: Any, avals: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return the arrays of a call on a GPU, each behind a barrier.

    Without the barriers XLA of JAX 0.11.1 to 0.12 fuses slices with the call, and ends the process
    because the call has a token.
    """
    barrier = mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False)
    return [
        barrier(ctx.replace(avals_in=[aval], avals_out=[aval], tokens_out=None), value)[0]
        for aval, value in zip(avals, values, strict=True)
    ]


_SMALL = 512  # elements that are copied in a time that does not matter


def lowering(
    target: str,
    operands: int,
    aliases: dict[int, int] | None = None,
    attributes: Callable[[Sequence[Any], dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable[..., Any]:
    """Return the lowering of an effectful primitive to an FFI call between two tokens.

    Parameters
    ----------
    target
        The native handler.
    operands
        The number of operands that are passed to the handler. The others (the carrier is the last
        one) exist only for differentiation.
    aliases
        Operands whose memory a result may take, if they are not small. The token is operand and
        result 0.
    attributes
        (avals of the operands, params) -> attributes of the handler. Default: the parameters.
    """
    call = jax.ffi.ffi_lowering(target, has_side_effect=True)
    in_place = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)

    def rule(ctx: Any, *values: Any, **params: Any) -> Any:
        token = private("core.abstract_token")
        inner = ctx.replace(
            avals_in=(token, *ctx.avals_in[:operands]), avals_out=(token, *ctx.avals_out)
        )
        named = params if attributes is None else attributes(ctx.avals_in, params)
        # XLA compiles a kernel of its own for the copy that an alias may need.
        is_large = bool(aliases) and ctx.avals_in[0].size > _SMALL
        arrays: Sequence[Any] = values[:operands]
        if _on_gpu(ctx):
            arrays = _behind_barriers(ctx, ctx.avals_in[:operands], arrays)
        token_out, *results = (in_place if is_large else call)(
            inner,
            ctx.tokens_in.get(effect),
            *arrays,
            **{name: _attribute(value) for name, value in named.items()},
        )
        if _on_gpu(ctx):
            results = _behind_barriers(ctx, ctx.avals_out, results)
        ctx.set_tokens_out(mlir.TokenSet({effect: token_out}))
        return results

    return rule


def pure_lowering(
    target: str,
    operands: int | None,
    attributes: Callable[[Sequence[Any], dict[str, Any]], dict[str, Any]],
) -> Callable[..., Any]:
    """Return the lowering of a primitive without messages: an FFI call (arguments of `lowering`).

    Without `operands` the handler reads all operands.
    """
    call = jax.ffi.ffi_lowering(target)

    def rule(ctx: Any, *values: Any, **params: Any) -> Any:
        named = attributes(ctx.avals_in, params)
        return call(
            ctx.replace(avals_in=ctx.avals_in[:operands]),
            *values[:operands],
            **{name: _attribute(value) for name, value in named.items()},
        )

    return rule


def lower_to_nothing(ctx: Any, *operands: Any) -> list[Any]:
    """Lower an effectful primitive that does nothing: the token is passed on."""
    ctx.set_tokens_out(mlir.TokenSet({effect: ctx.tokens_in.get(effect)}))
    return []


def lower_in_token_region(
    enter: str, leave: str, turn_aval: ShapedArray
) -> Callable[..., Sequence[Any]]:
    """Return the lowering of a primitive (turn, *operands; jaxpr) -> (turn, *results).

    To JAX the primitive is pure. Inside, a token orders the messages. `enter` makes the token from
    the array `turn`, and `leave` makes the next `turn` from the token.
    """
    to_token = jax.ffi.ffi_lowering(enter, has_side_effect=True)
    from_token = jax.ffi.ffi_lowering(leave, has_side_effect=True)

    def rule(ctx: Any, turn: Any, *values: Any, jaxpr: Any) -> Sequence[Any]:
        token = private("core.abstract_token")
        (first,) = to_token(ctx.replace(avals_in=(turn_aval,), avals_out=(token,)), turn)
        inner = ctx.replace(
            avals_in=ctx.avals_in[1:],
            avals_out=ctx.avals_out[1:],
            tokens_in=mlir.TokenSet({effect: first}),
            tokens_out=None,
        )
        body = functools.partial(jax.core.eval_jaxpr, jaxpr, ())
        results = mlir.lower_fun(body, multiple_results=True)(inner, *values)
        last = inner.tokens_out.get(effect) if has_messages(jaxpr.effects) else first
        (next_turn,) = from_token(ctx.replace(avals_in=(token,), avals_out=(turn_aval,)), last)
        return [next_turn, *results]

    return rule


def lower_high_level(primitive: Primitive) -> None:
    """Lower a primitive (turn, *operands) with a jaxpr that JAX lowers in two steps.

    Since JAX 0.12 some functions of JAX are made of such primitives, special functions for example.
    """

    def to_lojax(turn: Any, *values: Any, jaxpr: Any) -> Any:
        lower = private("interpreters.partial_eval.lower_jaxpr2")
        jaxpr, constants = constants_as_operands(lower(ClosedJaxpr(jaxpr, ())))
        return primitive.bind(turn, *constants, *values, jaxpr=jaxpr)

    untyped: Any = primitive
    untyped.to_lojax = to_lojax


def constants_as_operands(closed_jaxpr: Any) -> tuple[Any, list[Any]]:
    """Return the jaxpr with its constants as leading operands, and the constants."""
    convert = private("interpreters.partial_eval.convert_constvars_jaxpr")
    return convert(closed_jaxpr.jaxpr), list(closed_jaxpr.consts)


# ---- when programs run ----


@functools.cache
def queues() -> bool:
    """Return True if a call of a program only queues it, as on GPUs. On CPUs it runs at once."""
    return jax.default_backend() != "cpu" or bool(_STAGED_AS)


def configure_backend(size: int) -> None:
    """Set the options that XLA reads once, when its CPU client starts (at import)."""
    initialized = optional("xla_bridge.backends_are_initialized")
    if initialized is None or initialized():
        if size > 1 and jax.config.read("jax_cpu_enable_async_dispatch"):
            raise ImportError(
                "mpigrad: expected to be imported before the first JAX computation, but JAX has "
                "already computed something in this process. It dispatches asynchronously, so "
                "messages could overtake each other. Import mpigrad earlier, or set "
                "JAX_CPU_ENABLE_ASYNC_DISPATCH=false."
            )
        return
    # A direct call of mpi4py must not overtake a message that is queued behind a computation.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    flags = os.environ.get("XLA_FLAGS", "").strip()
    names_a_file = bool(flags) and not flags.startswith("-")
    if size > 1 and not names_a_file and "intra_op_parallelism_threads" not in flags:
        # One compute thread per rank: ranks on one machine would fight for its cores otherwise.
        os.environ["XLA_FLAGS"] = (
            flags + " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        ).strip()
    if size > 1 and "intra_op_parallelism_threads=1" in os.environ.get("XLA_FLAGS", "").split():
        # XLA's pools have a thread for each core nevertheless, on each rank: on a node of 128 cores
        # that many ranks would start 30,000 threads.
        os.environ.setdefault("NPROC", "2")
