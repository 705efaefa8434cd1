"""Repairs of JAX's rules that drop or move messages: one hook for each.

JAX splits programs into a known and an unknown part when it linearizes, rematerializes or hoists
constants out of loops. A message must stay where it was written, on every rank. But JAX

* executes a message early if its operands are known (and takes it out of a `scan`),
* forgets the effects of `checkpoint` and `cond` if none of their results is unknown.

Two rules mend this, for programs with messages only: messages are always staged, never executed
early (`always_stage`), and `checkpoint` and `cond` get one more unknown result, so that their
unknown part survives. Each change of JAX is an entry of `HOOKS`. If a hook cannot be installed, the
feature that needs it is refused and everything else works. `_self_check.py` finds hooks that no
longer have an effect.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
from jax.extend import linear_util, source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import batching
from jax.interpreters import partial_eval as _partial_eval

from mpigrad.operations._jax_compat import ad, allow_in_custom_rules, has_messages
from mpigrad.operations._jax_private import (
    VERSION,
    UnsupportedJAXError,
    module_of,
    private,
    refuse,
    require,
)

__all__ = [
    "HOOKS",
    "Hook",
    "always_stage",
    "install_repairs",
    "mark_agreement",
    "run_piecewise",
    "surround_custom_rules",
]

partial_eval: Any = _partial_eval
_trace_context = private("core.trace_ctx")
_rules = partial_eval.custom_partial_eval_rules


def _sends(params: dict[str, Any]) -> bool:
    """Whether a jaxpr among the parameters of an equation has messages."""
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (Jaxpr, ClosedJaxpr)) and has_messages(part.effects):
                return True
    return False


# The traces in which a jvp rule runs to be linearized: at its place in the program, so that what is
# known there is executed. (Known are its primals. In a loop they may be the same each time, and
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
    """Also in the bodies of loops and branches of such a rule, which JAX splits by other traces."""
    inside = bool(_in_place) and not _hoisting
    return (inside or any(trace is t for t in _in_place)) and all(t.is_known() for t in tracers)


def _stage(primitive: Any, trace: Any, *tracers: Any, **params: Any) -> Any:
    if _is_in_place(trace, tracers):
        return trace.default_process_primitive(primitive, tracers, params)
    unknown = [trace.instantiate_const(t) for t in tracers]
    return trace.default_process_primitive(primitive, unknown, params)


def always_stage(primitive: Primitive) -> None:
    """Never execute `primitive` in the known part of a program, even if all operands are known."""
    _rules[primitive] = functools.partial(_stage, primitive)


# ---- calls of functions: checkpoint, cond, scan, jit ----

# Not empty while JAX looks for what is the same in all turns of a loop: there a call with messages
# stays as a whole, elsewhere its known part is executed.
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


ExtraResult = Callable[[dict[str, Any], int], dict[str, Any] | None]


def _repair(
    feature: str, name: str, with_extra_result: ExtraResult | None = None
) -> Callable[[], None]:
    """A hook: keep calls with messages of the primitive of this name, wherever they are split."""

    def install() -> None:
        primitive = getattr(jax_primitives, name)

        def default(trace: Any, *tracers: Any, **params: Any) -> Any:
            return trace.default_process_primitive(primitive, tracers, params)

        plain = _rules.get(primitive, default)

        def rule(trace: Any, *tracers: Any, **params: Any) -> Any:
            if not _sends(params):
                return plain(trace, *tracers, **params)
            require(feature)
            if _is_in_place(trace, tracers):
                return default(trace, *tracers, **params)
            if not tracers:
                return _split_without_operands(plain, trace, params)
            unknown = [i for i, t in enumerate(tracers) if not t.is_known()]
            if not unknown or _hoisting:
                return _stage(primitive, trace, *tracers, **params)
            with _own_part(feature):
                extended = with_extra_result(params, unknown[-1]) if with_extra_result else None
            if extended is None:
                return plain(trace, *tracers, **params)
            *results, extra = plain(trace, *tracers, **extended)
            with _own_part(feature):
                _keep_alive(trace, extra)
            return results

        _rules[primitive] = rule

    return install


def _split_without_operands(plain: Any, trace: Any, params: dict[str, Any]) -> Any:
    """To JAX an equation without operands is known, and moves out of loops. Its messages do not."""
    body = params.get("jaxpr")
    if isinstance(body, Jaxpr):  # of a checkpoint: there is nothing that it would compute again
        with private("core.set_current_trace")(trace):
            return jaxpr_as_fun(ClosedJaxpr(body, []))()
    return plain(trace, **params)


@contextlib.contextmanager
def _own_part(feature: str) -> Iterator[None]:
    """Errors of what mpigrad does with JAX's parameters and tracers refuse the feature."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, UnsupportedJAXError) as error:
        refuse(feature, f"{type(error).__name__}: {error}")
        require(feature)


def _keep_alive(trace: Any, tracer: Any) -> None:
    """Keep the equation that makes `tracer`, although nothing depends on it."""
    recipe = tracer.recipe
    is_equation = isinstance(recipe, private("interpreters.partial_eval.JaxprEqnRecipe"))
    if is_equation and has_messages(recipe.effects):
        handle = private("interpreters.partial_eval.EffectHandle")
        trace.effect_handles.append(handle(recipe.in_tracers, recipe))


def _checkpoint_extra_result(params: dict[str, Any], operand: int) -> dict[str, Any]:
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


def _keep_linear_solves_in_place() -> None:
    _repair("jax.lax.custom_linear_solve", "linear_solve_p")()
    plain = ad.primitive_jvps[jax_primitives.linear_solve_p]

    def in_place(*args: Any, **params: Any) -> Any:
        with _linearized_in_place():
            return plain(*args, **params)

    ad.primitive_jvps[jax_primitives.linear_solve_p] = in_place


def _keep_calls() -> None:
    calls = {getattr(jax_primitives, name): name for name in ("call_p", "closed_call_p")}
    for primitive, name in calls.items():  # one since JAX 0.11
        if primitive in _rules:
            _repair("nested jax.jit", name)()
        else:
            _inline_call(primitive)


def _inline_call(primitive: Any) -> None:
    """A call with messages is split into known and unknown equation by equation.

    (`checkpoint` makes calls of scans. Split as a whole, a call none of whose results is unknown,
    since it only sends, is forgotten.)
    """
    JaxprTrace = private("interpreters.partial_eval.JaxprTrace")

    def around(trace: Any, functions: Any, args: Any, equation: Any, proceed: Any) -> Any:
        if equation is not None and isinstance(trace, JaxprTrace) and _sends(equation):
            with private("core.set_current_trace")(trace):
                return functions[0].call_wrapped(*args)
        return proceed(functions)

    _around_call(primitive, 1, around)


def _around_call(primitive: Any, n: int, around: Callable[..., Any]) -> None:
    """Let `around(trace, functions, args, equation, proceed)` decide how a call is processed.

    `functions` are the `n` functions that the call is of, `equation` the parameters of the equation
    that is evaluated (None if the call is not read from a jaxpr), and `proceed(functions)` is what
    JAX does with the call.
    """
    bind, plain = primitive.bind_with_trace, primitive.get_bind_params

    def bind_with_trace(trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        params = dict(params)
        equation = params.pop("equation", None)

        def proceed(parts):
            return bind(trace, args, avals, {**params, "subfuns": tuple(parts)})

        return around(trace, params["subfuns"], args, equation, proceed)

    def bind_functions_and_args(trace: Any, args: Any, params: Any, /) -> Any:
        params = dict(params)
        equation = params.pop("equation", None)
        functions, args = args[:n], args[n:]

        def proceed(parts):
            return bind(trace, (*parts, *args), params)

        return around(trace, functions, args, equation, proceed)

    def get_bind_params(params: Any) -> Any:
        found = plain(params)
        if isinstance(found, dict):
            return {**found, "equation": params}
        functions, rest = found  # JAX 0.8
        return functions, {**rest, "equation": params}

    takes = len(inspect.signature(bind).parameters)
    if takes not in (3, 4):
        raise UnsupportedJAXError(f"{primitive}.bind_with_trace takes {takes} arguments")
    # In JAX 0.8 the functions stand before the arguments.
    primitive.bind_with_trace = bind_with_trace if takes == 4 else bind_functions_and_args
    primitive.get_bind_params = get_bind_params


def _keep_messages_in_loops() -> None:
    name = "lax.control_flow.loops._scan_known_hoisting"
    module_of(name)._scan_known_hoisting = _hoists(private(name))
    custom_rules = partial_eval.partial_eval_jaxpr_custom_rules
    custom_rules[jax_primitives.scan_p] = _hoists(custom_rules[jax_primitives.scan_p])


def _keep_checkpoints_without_results() -> None:
    """JAX drops a checkpoint if neither operands nor results of it are used, with its messages."""
    plain = partial_eval.dce_rules[jax_primitives.remat_p]

    def rule(used_outputs: list[bool], *rest: Any) -> Any:
        used_inputs, kept = plain(used_outputs, *rest)
        eqn = rest[-1]  # since JAX 0.12 after which operands are live
        if kept is not None or not _sends(eqn.params):
            return used_inputs, kept
        with _own_part("jax.checkpoint"):
            jaxpr, used_inputs = partial_eval.dce_jaxpr(eqn.params["jaxpr"], used_outputs)
            one_for_all = not isinstance(eqn.params["prevent_cse"], tuple)
            params = {**eqn.params, "jaxpr": jaxpr}
            params = params if one_for_all else {**params, "prevent_cse": ()}
            kept = eqn.replace(invars=[], outvars=[], params=params, effects=jaxpr.effects)
        return used_inputs, kept

    partial_eval.dce_rules[jax_primitives.remat_p] = rule


def _round_real_residuals_only() -> None:
    """`checkpoint` rounds what it keeps, by an operation that refuses complex numbers."""
    name = "ad_checkpoint._insert_reduce_precision"
    plain = private(name)

    def rounded(jaxpr: Any, residuals: int) -> Any:
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

    module_of(name)._insert_reduce_precision = rounded


def _print_once_in_checkpoints() -> None:
    """JAX would also print what is not there in the backward pass, as results of messages are not.

    (It forgets to keep them: `KeyError: Var(id=...)`.)
    """
    rules = partial_eval.partial_eval_jaxpr_custom_rules
    for primitive in [p for p in rules if p.name in ("debug_callback", "debug_print")]:
        rules[primitive] = functools.partial(_print_once, rules[primitive])


def _print_once(
    plain: Callable[..., Any], saveable: Any, unknown: Any, there: Sequence[bool], eqn: Any
) -> Any:
    forward, backward, *rest = plain(saveable, unknown, there, eqn)
    if forward is not None and not all(there):
        backward = None
    return forward, backward, *rest


# ---- branches and loops that cannot be repaired ----

_agreements: set[Primitive] = set()


def mark_agreement(primitive: Primitive) -> None:
    """In a branch, `primitive` says that all ranks take that branch together."""
    _agreements.add(primitive)


def _refuse_batched_conds() -> None:
    batchers = batching.fancy_primitive_batchers
    plain = batchers[jax_primitives.cond_p]
    batchers[jax_primitives.cond_p] = functools.partial(_batched_cond, plain)


def _batched_cond(plain: Callable[..., Any], axis: Any, args: Any, dims: Any, **params: Any) -> Any:
    """JAX makes a selection of it, so that every rank goes through all branches.

    Messages in a branch would then meet those in the same branch of the other ranks, whatever
    these have chosen.
    """
    equations = [e for branch in params["branches"] for e in branch.jaxpr.eqns]
    sends = any(has_messages(e.effects) for e in equations)
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


def _refuse_reverse_while_loops() -> None:
    _rules[jax_primitives.while_p] = functools.partial(
        _partial_while, _rules[jax_primitives.while_p]
    )


def _partial_while(plain: Callable[..., Any], trace: Any, *tracers: Any, **params: Any) -> Any:
    if _sends(params) and _is_in_place(trace, tracers):
        return trace.default_process_primitive(jax_primitives.while_p, tracers, params)
    if _sends(params) and not all(t.is_known() for t in tracers):
        raise ValueError(
            "a while_loop (or a fori_loop whose bounds are traced) with messages can't be "
            "differentiated in reverse mode, nor by linearize. Use jax.lax.scan, or a fori_loop "
            "with constant bounds; jvp and jacobian(mode='forward') take it as it is."
        )
    return plain(trace, *tracers, **params)


# ---- programs that JAX would run without tokens, or twice ----


def _keep_tokens_ahead_of_time() -> None:
    executable = private("interpreters.pxla.MeshExecutable")
    fast_call = executable.create_cpp_call

    def create_cpp_call(self: Any, params: Any) -> Any:
        try:  # this call hands over no tokens
            fast = not has_messages(self.unsafe_call.ordered_effects)
        except AttributeError:  # who knows: the slow call is always right
            fast = False
        return fast_call(self, params) if fast else None

    executable.create_cpp_call = create_cpp_call


def _run_once_with_debug_nans() -> None:
    """With jax_debug_nans JAX calls a function again, on the rank alone whose result has a NaN."""
    name = "api_util.maybe_recursive_nan_check"
    plain = private(name)

    def not_again(error: Any, f: Any, args: Any, kwargs: Any) -> Any:
        _refuse_second_run(jax.make_jaxpr(lambda: f(*args, **kwargs))())
        return plain(error, f, args, kwargs)

    module_of(name).maybe_recursive_nan_check = not_again


def _refuse_second_run(jaxpr: Any) -> None:
    """An error if a program with messages would be run again to find a NaN in it."""
    if has_messages(jaxpr.effects):
        raise FloatingPointError(
            "NaN (jax_debug_nans) or infinity (jax_debug_infs) in the result of a compiled "
            "function with messages, which is not run again on this rank alone to find its place: "
            "compile its parts without messages by themselves, or call it without jit on all ranks"
        ) from None


def run_piecewise(jaxpr: Any, *operands: Any) -> list[Any]:
    """A program without messages, equation by equation, as JAX looks for a NaN in it."""
    _refuse_second_run(jaxpr)
    return jax.core.eval_jaxpr(jaxpr, (), *operands)


# ---- rules of jax.custom_jvp and jax.custom_vjp ----


@linear_util.transformation2
def _inside(f: Callable[..., Any], around: Callable[[], Any], rule: bool, *args: Any) -> Any:
    with around(), _linearized_in_place() if rule else contextlib.nullcontext():
        return f(*args)


_CUSTOM_RULES = "custom rules"


def surround_custom_rules(
    function: Callable[[], Any], jvp_rule: Callable[[], Any], vjp_rule: Callable[[], Any]
) -> None:
    """Run the parts of jax.custom_jvp and jax.custom_vjp in these contexts.

    `function`: the function itself. `jvp_rule`, and of custom_vjp the backward rule. A function
    with messages is staged as a whole, as its messages would be.
    """
    rules = {
        jax_primitives.custom_jvp_call_p: (function, jvp_rule),
        jax_primitives.custom_vjp_call_p: (function, None, vjp_rule),
    }
    try:
        for primitive, contexts in rules.items():
            _surround(primitive, contexts, jvp_rule)
        allow_in_custom_rules()  # else JAX itself refuses them: nobody would watch their rules
    except _CHANGES as error:
        refuse(_CUSTOM_RULES, f"{type(error).__name__}: {error}")


def _surround(primitive: Any, contexts: Any, jvp_rule: Any) -> None:
    JaxprTrace = private("interpreters.partial_eval.JaxprTrace")

    def around(trace: Any, functions: Any, args: Any, equation: Any, proceed: Any) -> Any:
        if equation is not None and isinstance(trace, JaxprTrace) and _sends(equation):
            require(_CUSTOM_RULES)
            tracers = [trace.to_jaxpr_tracer(x) for x in args]
            if not _is_in_place(trace, tracers):
                return _stage_call(primitive, trace, tracers, equation)
        return proceed(
            part if context is None else _inside(part, context, context is jvp_rule)
            for part, context in zip(functions, contexts, strict=True)
        )

    _around_call(primitive, len(contexts), around)


def _stage_call(primitive: Any, trace: Any, tracers: Any, params: dict[str, Any]) -> Any:
    """`_stage` for a call that has no rule of abstract evaluation."""
    inputs = [trace.instantiate_const(t) for t in tracers]
    jaxpr, unknown = params["call_jaxpr"], partial_eval.PartialVal.unknown
    outputs = [partial_eval.JaxprTracer(trace, unknown(a), None) for a in jaxpr.out_avals]
    stack = trace._current_truncated_name_stack()
    source = source_info_util.current().replace(name_stack=stack)
    # JAX 0.10.0 and older have no other effects than those by position.
    has_others = VERSION >= (0, 10, 1)
    kinds = private("core.positional_effects")(jaxpr) if has_others else jaxpr.effects
    new_recipe = private("interpreters.partial_eval.new_eqn_recipe")
    recipe = new_recipe(trace, inputs, outputs, primitive, params, kinds, source)
    handle = private("interpreters.partial_eval.EffectHandle")
    trace.effect_handles.append(handle(inputs, recipe))
    for output in outputs:
        output.recipe = recipe
    return outputs


# ---- the table of hooks ----

_CHANGES = (UnsupportedJAXError, AttributeError, ImportError, KeyError, TypeError, ValueError)
# For tools/jax_hooks.py: the name of a hook that is left out.
_LEFT_OUT = "MPIGRAD_WITHOUT_JAX_HOOK"


@dataclass(frozen=True)
class Hook:
    """One change of JAX: what a user writes that needs it, and a test that fails without it.

    Without a feature, JAX itself ends with an error if the hook is missing. With JAX `until` or
    later the hook is not needed.
    """

    name: str
    feature: str
    install: Callable[[], None]
    test: str
    upstream: str = ""
    until: tuple[int, ...] = ()


_DIVERGENT = "tests/operations/test_divergent.py"
_CALLS = "tests/operations/test_known_calls.py"
_OTHER = "tests/autodiff/test_transforms.py"

HOOKS = (
    Hook(
        "split checkpoint",
        "jax.checkpoint",
        _repair("jax.checkpoint", "remat_p", _checkpoint_extra_result),
        _DIVERGENT,
        "jax#5134",
    ),
    Hook(
        "split cond",
        "jax.lax.cond",
        _repair("jax.lax.cond", "cond_p", _cond_extra_result),
        _DIVERGENT,
    ),
    Hook("split calls", "nested jax.jit", _keep_calls, _CALLS, until=(0, 11)),
    Hook(
        "split linear solves",
        "jax.lax.custom_linear_solve",
        _keep_linear_solves_in_place,
        _CALLS,
        "jax#26087",
    ),
    Hook("hoist", "jax.lax.scan", _keep_messages_in_loops, _CALLS, "jax#16637"),
    Hook(
        "dead checkpoint",
        "jax.checkpoint",
        _keep_checkpoints_without_results,
        _DIVERGENT,
        "jax#5134",
        until=(0, 12),
    ),
    Hook(
        "complex checkpoint",
        "",
        _round_real_residuals_only,
        "tests/operations/test_operations.py",
        "jax#22244",
    ),
    Hook(
        "debug print",
        "",
        _print_once_in_checkpoints,
        "tests/operations/test_jax_versions.py",
    ),
    Hook("batched cond", "jax.lax.cond", _refuse_batched_conds, _CALLS),
    Hook(
        "reverse while_loop",
        "jax.lax.while_loop",
        _refuse_reverse_while_loops,
        "tests/autodiff/test_jacobian.py",
    ),
    Hook(
        "ahead of time",
        "",
        _keep_tokens_ahead_of_time,
        _CALLS,
        "jax#10295",
    ),
    Hook("debug_nans", "jax_debug_nans", _run_once_with_debug_nans, _OTHER, "jax#10251"),
)

# The primitives whose derivatives are refused with a feature.
_PRIMITIVES = {
    "jax.checkpoint": ("remat_p",),
    "jax.lax.cond": ("cond_p",),
    "jax.lax.scan": ("scan_p",),
    "jax.lax.while_loop": ("while_p",),
    "nested jax.jit": ("jit_p", "call_p", "closed_call_p"),
    "jax.lax.custom_linear_solve": ("linear_solve_p",),
}


@functools.cache
def install_repairs() -> None:
    """Install all hooks. If one cannot be installed, its feature is refused."""
    guard_features()
    for hook in HOOKS:
        if os.environ.get(_LEFT_OUT) == hook.name:
            continue
        try:
            hook.install()
        except _CHANGES as error:
            if hook.feature:
                refuse(hook.feature, f"{type(error).__name__}: {error}")


def guard_features() -> None:
    """Derivatives of calls with messages ask first whether this JAX has what they need."""
    linearizations = private("interpreters.ad.primitive_linearizations")
    for feature, names in _PRIMITIVES.items():
        for primitive in {getattr(jax_primitives, n) for n in names if hasattr(jax_primitives, n)}:
            for rules in (ad.primitive_jvps, linearizations):
                if primitive in rules:
                    rules[primitive] = _asking(feature, rules[primitive])


def _asking(feature: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def rule(*args: Any, **params: Any) -> Any:
        if _sends(params):
            require(feature)
        return plain(*args, **params)

    return rule
