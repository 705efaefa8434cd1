"""Every private name of JAX that mpigrad needs, and the repair of what JAX drops.

JAX splits programs into a known and an unknown part when it linearizes, rematerialises or hoists
constants out of loops. A message must stay where it was written, on every rank alike; but JAX

* executes a message early when its operands are known (and hoists it out of a `scan`),
* forgets the effects of `checkpoint` and `cond` when none of their results is unknown.

Two rules mend this, for programs with messages only: messages are always staged, never executed
early (`always_stage`), and `checkpoint` and `cond` get one more unknown result, so that their
unknown part survives (`install_repairs`). No function of JAX is edited.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import (
    ad_checkpoint,
    api_util,
    core,
    custom_derivatives,
    effects,
    linear_util,
    pjit,
    source_info_util,
    util,
)
from jax._src.array import ArrayImpl
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla
from jax._src.lax.control_flow import conditionals, loops, solves
from jax._src.xla_bridge import backends_are_initialized
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import batching, mlir

__all__ = [
    "Primitive",
    "ShapedArray",
    "ad",
    "always_stage",
    "batching",
    "configure_backend",
    "constants_as_operands",
    "effect",
    "install_repairs",
    "is_batched",
    "is_top_level",
    "let_go",
    "lower_in_token_region",
    "lower_to_nothing",
    "lowering",
    "make_effectful",
    "mark_agreement",
    "mlir",
    "other_orders",
    "queues",
    "register_lowering",
    "register_target",
    "run_directly",
    "run_piecewise",
    "set_linearization",
    "surround_custom_rules",
    "tangent_aval",
    "visible",
]

ShapedArray = core.ShapedArray
_trace_context = core.trace_ctx
ad: Any = _ad  # untyped: what is used here is not exported under these names
partial_eval: Any = _partial_eval


class MPIEffect(effects.Effect):
    """One ordered effect for all messages of a process: they keep the program's order."""

    def __str__(self) -> str:
        return "MPI"

    def __hash__(self) -> int:
        return hash(MPIEffect)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MPIEffect)


effect = MPIEffect()
for _kinds in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
    effects.partial_eval_kept_effects,  # without it `grad` of an unused receive is silently zero
):
    _kinds.add_type(MPIEffect)


def make_effectful(primitive: Primitive, shape_rule: Callable[..., Sequence[ShapedArray]]) -> None:
    """Let `primitive` carry the ordered effect; `shape_rule` gives the avals of its results."""
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(
        lambda *avals, **params: (list(shape_rule(*avals, **params)), {effect})
    )


def set_linearization(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Give `primitive` the rule (is_vjp, nonzeros, *primals) -> (results, nonzeros, known, linear).

    JAX 0.8 does not say whether the derivative will be transposed: it is taken to be. Since JAX
    0.11 a rule also returns structured residuals, and `linear` takes them.
    """

    def without_purpose(*args: Any, **params: Any) -> Any:
        return rule(True, *args, **params)

    def with_structured_residuals(*args: Any, **params: Any) -> Any:
        results, nonzeros, known, linear = rule(*args, **params)
        return results, nonzeros, known, None, lambda res, _, *tangents: linear(res, *tangents)

    version = jax.__version_info__
    adapted = without_purpose if version < (0, 9) else rule
    ad.primitive_linearizations[primitive] = (
        adapted if version < (0, 11) else with_structured_residuals
    )


def tangent_aval(x: Any) -> Any:
    """The aval of the tangent of `x` (float0 for integers)."""
    return core.typeof(x).to_tangent_aval()


def is_top_level() -> bool:
    """No transformation and no trace is active."""
    return _trace_context.trace is core.eval_trace


def let_go(kind: type) -> None:
    """JAX's cache of abstract evaluations keeps no parameter of this type alive."""
    util.weakref_cache_key_types.add(kind)


def run_directly(primitive: Primitive, run: Callable[..., Any]) -> None:
    """Outside any trace `primitive` is `run`, and arrays go there without JAX's detour."""
    primitive.def_impl(run)
    plain = primitive.bind

    def bind(*operands: Any, **params: Any) -> Any:
        if _trace_context.trace is core.eval_trace:
            for x in operands:
                if type(x) is not ArrayImpl and type(x) is not np.float32:
                    break
            else:
                return run(*operands, **params)
        return plain(*operands, **params)

    primitive.bind = bind


def is_batched(x: Any) -> bool:
    """Whether `x` is an operand of the enclosing `vmap` with its axis."""
    return isinstance(x, _batching.BatchTracer)


def visible(tracer: Any) -> bool:
    """Whether the trace that made `tracer` is the current one or below it."""
    trace = core.trace_ctx.trace
    while trace is not None:
        if trace is tracer._trace:
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


# ---- lowering ----

# What JAX and XLA call the platforms that native handlers are for.
_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
# For tests: arrays of CPUs are copied as arrays of GPUs are.
_STAGES_ON_CPU = os.environ.get("MPIGRAD_STAGE") == "1"


def register_target(name: str, handler: Any, staged: Any) -> None:
    """Make a handler known to XLA: `handler` for CPUs, `staged` for GPUs."""
    for platform in _PLATFORMS.values():
        function = handler if platform == "cpu" and not _STAGES_ON_CPU else staged
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform=platform)


def register_lowering(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Lower `primitive` so on all platforms that native handlers are for."""
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


def lowering(
    target: str,
    operands: int,
    aliases: dict[int, int] | None = None,
    attributes: Callable[[Sequence[Any], dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable[..., Any]:
    """Lowering of an effectful primitive to an FFI call between two tokens.

    `values[:operands]` are handed over; the others (the carrier, the last one) only exist for
    differentiation. `aliases` counts the token as operand and result 0. `attributes` makes
    the handler's attributes from the operands' avals and the parameters (default: the parameters).
    """
    call = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)

    def rule(ctx: Any, *values: Any, **params: Any) -> Any:
        token = core.abstract_token
        inner = ctx.replace(
            avals_in=(token, *ctx.avals_in[:operands]), avals_out=(token, *ctx.avals_out)
        )
        given = params if attributes is None else attributes(ctx.avals_in, params)
        token_out, *results = call(
            inner,
            ctx.tokens_in.get(effect),
            *values[:operands],
            **{name: _attribute(value) for name, value in given.items()},
        )
        ctx.set_tokens_out(mlir.TokenSet({effect: token_out}))
        return results

    return rule


def lower_to_nothing(ctx: Any, *operands: Any) -> list[Any]:
    """Lowering of an effectful primitive that does nothing: the token goes past it."""
    ctx.set_tokens_out(mlir.TokenSet({effect: ctx.tokens_in.get(effect)}))
    return []


def lower_in_token_region(
    enter: str, leave: str, turn_aval: ShapedArray
) -> Callable[..., Sequence[Any]]:
    """Lowering of a primitive (turn, *operands; jaxpr) -> (turn, *results) with messages inside.

    To JAX the primitive has no effect; inside, the messages are ordered by a token that `enter`
    makes of the array `turn`, and of which `leave` makes the next `turn`.
    """
    to_token = jax.ffi.ffi_lowering(enter, has_side_effect=True)
    from_token = jax.ffi.ffi_lowering(leave, has_side_effect=True)

    def rule(ctx: Any, turn: Any, *values: Any, jaxpr: Any) -> Sequence[Any]:
        token = core.abstract_token
        (first,) = to_token(ctx.replace(avals_in=(turn_aval,), avals_out=(token,)), turn)
        inner = ctx.replace(
            avals_in=ctx.avals_in[1:],
            avals_out=ctx.avals_out[1:],
            tokens_in=mlir.TokenSet({effect: first}),
            tokens_out=None,
        )
        body = functools.partial(core.eval_jaxpr, jaxpr, ())
        results = mlir.lower_fun(body, multiple_results=True)(inner, *values)
        last = inner.tokens_out.get(effect) if _has_messages(jaxpr.effects) else first
        (next_turn,) = from_token(ctx.replace(avals_in=(token,), avals_out=(turn_aval,)), last)
        return [next_turn, *results]

    return rule


def constants_as_operands(closed_jaxpr: Any) -> tuple[Any, list[Any]]:
    """The jaxpr with its constants as leading operands, and these constants."""
    return partial_eval.convert_constvars_jaxpr(closed_jaxpr.jaxpr), list(closed_jaxpr.consts)


# ---- partial evaluation keeps messages where they were written ----

_rules = partial_eval.custom_partial_eval_rules


def _has_messages(kinds: Any) -> bool:
    return any(isinstance(kind, MPIEffect) for kind in kinds)


def other_orders(kinds: Any) -> list[str]:
    """The names of ordered effects that are not of messages."""
    ordered = [k for k in kinds if effects.ordered_effects.contains(k)]
    return sorted({str(k) for k in ordered if not isinstance(k, MPIEffect)})


# The traces in which a jvp rule runs to be linearized: at its place in the program, so that what is
# known there is executed. (Known are its primals; in a loop they may be the same each time, and
# other traces would move them out of it.)
_in_place: list[Any] = []


@contextlib.contextmanager
def _linearized_in_place() -> Iterator[None]:
    _in_place.append(_trace_context.trace)
    try:
        yield
    finally:
        _in_place.pop()


def _is_in_place(trace: Any, tracers: Sequence[Any]) -> bool:
    return any(trace is t for t in _in_place) and all(t.is_known() for t in tracers)


def _stage(primitive: Any, trace: Any, *tracers: Any, **params: Any) -> Any:
    if _is_in_place(trace, tracers):
        return trace.default_process_primitive(primitive, tracers, params)
    unknown = [trace.instantiate_const(t) for t in tracers]
    return trace.default_process_primitive(primitive, unknown, params)


def always_stage(primitive: Primitive) -> None:
    """Never execute `primitive` in the known part of a program, even with all operands known."""
    _rules[primitive] = functools.partial(_stage, primitive)


# Not empty while JAX looks for what is the same in all turns of a loop: there a call with messages
# stays as a whole, where elsewhere its known part is executed.
_hoisting: list[None] = []


def _hoists(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _hoisting.append(None)
        try:
            return plain(*args, **kwargs)
        finally:
            _hoisting.pop()

    return wrapped


def _checkpoint_without_dead_code(plain: Any, used_outputs: list[bool], *rest: Any) -> Any:
    """JAX drops a checkpoint of which neither operands nor results are used, with its messages."""
    used_inputs, kept = plain(used_outputs, *rest)
    eqn = rest[-1]  # since JAX 0.12 after which operands are live
    if kept is not None or not _has_messages(eqn.params["jaxpr"].effects):
        return used_inputs, kept
    jaxpr, used_inputs = partial_eval.dce_jaxpr(eqn.params["jaxpr"], used_outputs)
    one_for_all = not isinstance(eqn.params["prevent_cse"], tuple)
    params = eqn.params if one_for_all else {**eqn.params, "prevent_cse": ()}
    kept = partial_eval.new_jaxpr_eqn(
        [], [], eqn.primitive, {**params, "jaxpr": jaxpr}, jaxpr.effects, eqn.source_info, eqn.ctx
    )
    return used_inputs, kept


def _repair(
    primitive: Any,
    effects_of: Callable[[dict[str, Any]], Any],
    with_extra_result: Callable[[dict[str, Any], int], dict[str, Any] | None] | None = None,
) -> None:
    def default(trace: Any, *tracers: Any, **params: Any) -> Any:
        return trace.default_process_primitive(primitive, tracers, params)

    plain = _rules.get(primitive, default)

    def rule(trace: Any, *tracers: Any, **params: Any) -> Any:
        if not _has_messages(effects_of(params)):
            return plain(trace, *tracers, **params)
        if _is_in_place(trace, tracers):
            return default(trace, *tracers, **params)
        unknown = [i for i, t in enumerate(tracers) if not t.is_known()]
        if not unknown or _hoisting:
            return _stage(primitive, trace, *tracers, **params)
        extended = with_extra_result(params, unknown[-1]) if with_extra_result else None
        if extended is None:
            return plain(trace, *tracers, **params)
        *results, extra = plain(trace, *tracers, **extended)
        recipe = extra.recipe
        if isinstance(recipe, partial_eval.JaxprEqnRecipe) and _has_messages(recipe.effects):
            handle = partial_eval.EffectHandle(recipe.in_tracers, recipe)
            trace.effect_handles.append(handle)
        return results

    _rules[primitive] = rule


def _remat_extra_result(params: dict[str, Any], operand: int) -> dict[str, Any]:
    jaxpr = params["jaxpr"]
    outvars = [*jaxpr.outvars, jaxpr.invars[operand]]
    return {**params, "jaxpr": jaxpr.replace(outvars=outvars)}


def _cond_extra_result(params: dict[str, Any], operand: int) -> dict[str, Any] | None:
    if operand == 0:  # the branch index itself is unknown: JAX stages the whole `cond`
        return None
    branches = []
    for branch in params["branches"]:
        outvars = [*branch.jaxpr.outvars, branch.jaxpr.invars[operand - 1]]
        branches.append(ClosedJaxpr(branch.jaxpr.replace(outvars=outvars), branch.consts))
    return {**params, "branches": tuple(branches)}


@functools.cache
def install_repairs() -> None:
    """Wrap JAX's rules for calls of functions, for programs with messages only."""
    _repair(ad_checkpoint.remat_p, lambda p: p["jaxpr"].effects, _remat_extra_result)
    _repair(
        conditionals.cond_p,
        lambda p: {e for branch in p["branches"] for e in branch.jaxpr.effects},
        _cond_extra_result,
    )
    _repair(loops.scan_p, lambda p: p["jaxpr"].jaxpr.effects)
    _repair(pjit.jit_p, lambda p: p["jaxpr"].jaxpr.effects)
    _repair(
        solves.linear_solve_p,
        lambda p: {e for jaxpr in p["jaxprs"] if jaxpr is not None for e in jaxpr.effects},
    )
    solve_jvp = ad.primitive_jvps[solves.linear_solve_p]

    def in_place(*args: Any, **params: Any) -> Any:
        with _linearized_in_place():
            return solve_jvp(*args, **params)

    ad.primitive_jvps[solves.linear_solve_p] = in_place
    loops._scan_known_hoisting = _hoists(loops._scan_known_hoisting)
    dead_code = partial_eval.dce_rules
    plain_dce = dead_code[ad_checkpoint.remat_p]
    dead_code[ad_checkpoint.remat_p] = functools.partial(_checkpoint_without_dead_code, plain_dce)
    custom_rules = partial_eval.partial_eval_jaxpr_custom_rules
    custom_rules[loops.scan_p] = _hoists(custom_rules[loops.scan_p])
    batchers = batching.fancy_primitive_batchers
    plain = batchers[conditionals.cond_p]
    batchers[conditionals.cond_p] = functools.partial(_batched_cond, plain)
    _rules[loops.while_p] = functools.partial(_partial_while, _rules[loops.while_p])
    for primitive in {core.call_p, core.closed_call_p}:  # since JAX 0.11 the same one
        if primitive in _rules:
            _repair(primitive, lambda p: p["call_jaxpr"].effects)
        else:
            _inline_call(primitive)
    rounded = ad_checkpoint._insert_reduce_precision
    ad_checkpoint._insert_reduce_precision = functools.partial(_rounded_if_real, rounded)
    executable: Any = pxla.MeshExecutable
    fast_call = executable.create_cpp_call
    # Of a program that is compiled ahead of time: this call hands over no tokens.
    executable.create_cpp_call = lambda self, params: (
        None
        if _has_messages(getattr(self.unsafe_call, "ordered_effects", ()))
        else fast_call(self, params)
    )
    again = api_util.maybe_recursive_nan_check
    api_util.maybe_recursive_nan_check = functools.partial(_not_again, again)


def _not_again(plain: Callable[..., Any], error: Any, f: Any, args: Any, kwargs: Any) -> Any:
    """With jax_debug_nans JAX calls a function again, on the rank alone whose result has a NaN."""
    _refuse_second_run(jax.make_jaxpr(lambda: f(*args, **kwargs))())
    return plain(error, f, args, kwargs)


def _refuse_second_run(jaxpr: Any) -> None:
    """An error where a program with messages would be run again to find a NaN in it."""
    if _has_messages(jaxpr.effects):
        raise FloatingPointError(
            "NaN (jax_debug_nans) or infinity (jax_debug_infs) in the result of a compiled "
            "function with messages, which is not run again on this rank alone to find its place: "
            "compile its parts without messages by themselves, or call it without jit on all ranks"
        ) from None


def run_piecewise(jaxpr: Any, *operands: Any) -> list[Any]:
    """A program without messages, equation by equation, as JAX looks for a NaN in it."""
    _refuse_second_run(jaxpr)
    return core.eval_jaxpr(jaxpr, (), *operands)


def _rounded_if_real(plain: Callable[..., Any], jaxpr: Any, residuals: int) -> Any:
    """`checkpoint` rounds what it keeps, by an operation that refuses complex numbers."""
    first = len(jaxpr.outvars) - residuals
    dtypes = [str(getattr(v.aval, "dtype", "")) for v in jaxpr.outvars]
    complex_ones = [i for i, d in enumerate(dtypes) if i >= first and d.startswith("complex")]
    order = [i for i in range(len(jaxpr.outvars)) if i not in complex_ones]
    order[first:first] = complex_ones
    moved = plain(
        jaxpr.replace(outvars=[jaxpr.outvars[i] for i in order]), residuals - len(complex_ones)
    )
    back = [order.index(i) for i in range(len(order))]
    return moved.replace(outvars=[moved.outvars[i] for i in back])


def _around_call(primitive: Any, n: int, around: Callable[..., Any]) -> None:
    """Let `around(trace, functions, args, equation, proceed)` decide how a call is processed.

    `functions` are the `n` functions that the call is of, `equation` the parameters of the equation
    that is evaluated (None where the call is not read from a jaxpr), and `proceed(functions)` what
    JAX does with the call.
    """
    bind, plain = primitive.bind_with_trace, primitive.get_bind_params

    def bind_with_trace(trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        params = dict(params)
        equation = params.pop("equation", None)
        proceed = lambda parts: bind(trace, args, avals, {**params, "subfuns": tuple(parts)})
        return around(trace, params["subfuns"], args, equation, proceed)

    def bind_functions_and_args(trace: Any, args: Any, params: Any, /) -> Any:
        params = dict(params)
        equation = params.pop("equation", None)
        functions, args = args[:n], args[n:]
        proceed = lambda parts: bind(trace, (*parts, *args), params)
        return around(trace, functions, args, equation, proceed)

    if len(inspect.signature(bind).parameters) == 4:
        primitive.bind_with_trace = bind_with_trace
        primitive.get_bind_params = lambda params: {**plain(params), "equation": params}
    else:  # JAX 0.8: the functions stand before the arguments
        primitive.bind_with_trace = bind_functions_and_args
        primitive.get_bind_params = lambda params: (
            (plain(params)[0], {**plain(params)[1], "equation": params})
        )


def _inline_call(primitive: Any) -> None:
    """A call with messages is split into known and unknown equation by equation.

    (`checkpoint` makes calls of scans. Split as a whole, a call none of whose results is unknown,
    since it only sends, is forgotten.)
    """

    def around(trace: Any, functions: Any, args: Any, equation: Any, proceed: Any) -> Any:
        kinds = () if equation is None else equation["call_jaxpr"].effects
        if isinstance(trace, partial_eval.JaxprTrace) and _has_messages(kinds):
            with core.set_current_trace(trace):
                return functions[0].call_wrapped(*args)
        return proceed(functions)

    _around_call(primitive, 1, around)


_agreements: set[Primitive] = set()


def mark_agreement(primitive: Primitive) -> None:
    """In a branch, `primitive` says that all ranks take that one together."""
    _agreements.add(primitive)


def _batched_cond(plain: Callable[..., Any], axis: Any, args: Any, dims: Any, **params: Any) -> Any:
    """JAX makes a selection of it, so that every rank goes through all branches.

    Messages in a branch would then meet those in the same branch of the other ranks, whatever
    these have chosen.
    """
    equations = [e for branch in params["branches"] for e in branch.jaxpr.eqns]
    sends = any(_has_messages(e.effects) for e in equations)
    alike = any(e.primitive in _agreements for e in equations)
    if dims[0] is not None and "branches_platforms" not in params and sends and not alike:
        raise ValueError(
            "a cond (or switch) with messages in its branches, whose predicate differs within a "
            "batch (vmap; jacobian(mode='reverse') of what depends on messages): all ranks would "
            "go through all branches, and their messages would meet those of branches that others "
            "have not chosen. Send outside of the branches and select by jnp.where, or go through "
            "the batch by jax.lax.map; of Jacobians take mode='forward'."
        )
    if alike:  # the mark is of this choice, and not of one around the selection
        branches = tuple(_without_marks(branch) for branch in params["branches"])
        params = {**params, "branches": branches} if dims[0] is not None else params
    return plain(axis, args, dims, **params)


def _without_marks(branch: Any) -> Any:
    equations = [e for e in branch.jaxpr.eqns if e.primitive not in _agreements]
    return ClosedJaxpr(branch.jaxpr.replace(eqns=equations), branch.consts)


def _partial_while(plain: Callable[..., Any], trace: Any, *tracers: Any, **params: Any) -> Any:
    kinds = params["cond_jaxpr"].jaxpr.effects | params["body_jaxpr"].jaxpr.effects
    if _has_messages(kinds) and _is_in_place(trace, tracers):
        return trace.default_process_primitive(loops.while_p, tracers, params)
    if _has_messages(kinds) and not all(t.is_known() for t in tracers):
        raise ValueError(
            "a while_loop (or a fori_loop whose bounds are traced) with messages can't be "
            "differentiated in reverse mode, nor by linearize. Use jax.lax.scan, or a fori_loop "
            "with constant bounds; jvp and jacobian(mode='forward') take it as it is."
        )
    return plain(trace, *tracers, **params)


# ---- rules of jax.custom_jvp and jax.custom_vjp ----


@linear_util.transformation2
def _inside(f: Callable[..., Any], around: Callable[[], Any], rule: bool, *args: Any) -> Any:
    with around(), _linearized_in_place() if rule else contextlib.nullcontext():
        return f(*args)


def surround_custom_rules(
    function: Callable[[], Any], jvp_rule: Callable[[], Any], vjp_rule: Callable[[], Any]
) -> None:
    """Run the parts of jax.custom_jvp and jax.custom_vjp in these contexts.

    `function`: the function itself; `jvp_rule`, and of custom_vjp the backward rule. A function
    with messages is staged as a whole, as its messages would be.
    """
    rules = {
        custom_derivatives.custom_jvp_call_p: (function, jvp_rule),
        custom_derivatives.custom_vjp_call_p: (function, None, vjp_rule),
    }
    for primitive, contexts in rules.items():

        def around(
            trace: Any,
            functions: Any,
            args: Any,
            equation: Any,
            proceed: Any,
            primitive=primitive,
            contexts=contexts,
        ) -> Any:
            if (
                equation is not None
                and isinstance(trace, partial_eval.JaxprTrace)
                and _has_messages(equation["call_jaxpr"].effects)
            ):
                tracers = [trace.to_jaxpr_tracer(x) for x in args]
                if not _is_in_place(trace, tracers):
                    return _stage_call(primitive, trace, tracers, equation)
            return proceed(
                part if context is None else _inside(part, context, context is jvp_rule)
                for part, context in zip(functions, contexts, strict=True)
            )

        _around_call(primitive, len(contexts), around)


# JAX 0.10.0 has no other effects.
_positional_effects = getattr(core, "positional_effects", lambda jaxpr: jaxpr.effects)


def _stage_call(primitive: Any, trace: Any, tracers: Any, params: dict[str, Any]) -> Any:
    """`_stage` for a call that has no rule of abstract evaluation."""
    inputs = [trace.instantiate_const(t) for t in tracers]
    jaxpr, unknown = params["call_jaxpr"], partial_eval.PartialVal.unknown
    outputs = [partial_eval.JaxprTracer(trace, unknown(a), None) for a in jaxpr.out_avals]
    stack = trace._current_truncated_name_stack()
    source = source_info_util.current().replace(name_stack=stack)
    kinds = _positional_effects(jaxpr)
    recipe = partial_eval.new_eqn_recipe(trace, inputs, outputs, primitive, params, kinds, source)
    trace.effect_handles.append(partial_eval.EffectHandle(inputs, recipe))
    for output in outputs:
        output.recipe = recipe
    return outputs


# ---- when programs run ----


@functools.cache
def queues() -> bool:
    """Whether a call of a program only queues it, as on GPUs; on CPUs it runs at once."""
    return jax.default_backend() != "cpu" or _STAGES_ON_CPU


def configure_backend(size: int) -> None:
    """Make the settings that XLA reads once, when its CPU client starts (at import)."""
    if backends_are_initialized():
        if size > 1 and jax.config.read("jax_cpu_enable_async_dispatch"):
            raise ImportError(
                "mpigrad: JAX has already computed something in this process, and dispatches "
                "asynchronously, so messages could overtake each other. Import mpigrad before "
                "the first JAX computation, or set JAX_CPU_ENABLE_ASYNC_DISPATCH=false."
            )
        return
    # A message queued behind a computation must not be overtaken by a direct call of mpi4py.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    flags = os.environ.get("XLA_FLAGS", "").strip()
    names_a_file = bool(flags) and not flags.startswith("-")
    if size > 1 and not names_a_file and "intra_op_parallelism_threads" not in flags:
        # One compute thread per rank: ranks on one machine would fight for its cores otherwise.
        os.environ["XLA_FLAGS"] = (
            flags + " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        ).strip()
