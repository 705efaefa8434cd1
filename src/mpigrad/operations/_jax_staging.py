"""Keep messages at their place in programs that JAX splits, and in custom rules."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend import linear_util, source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import partial_eval as _partial_eval

from mpigrad.operations._jax_compat import allow_in_custom_rules, has_messages
from mpigrad.operations._jax_private import VERSION, UnsupportedJAXError, private, refuse, require

__all__ = [
    "CHANGES",
    "always_stage",
    "has_messages_inside",
    "is_hoisting",
    "is_in_place",
    "mark_hoisting",
    "partial_eval",
    "partial_eval_rules",
    "run_in_place",
    "stage",
    "surround_custom_rules",
    "wrap_call",
]

# ---- Keep messages at their place when JAX splits a program into a known and an unknown part
#
# JAX does so to linearize a program, and executes the known part early. Messages, and calls with
# messages, belong to the unknown part even if all their operands are known (`stage`).


partial_eval: Any = _partial_eval
partial_eval_rules = partial_eval.custom_partial_eval_rules
_trace_context = private("core.trace_ctx")
# Errors of code for private parts of JAX that a new release has changed.
CHANGES = (UnsupportedJAXError, AttributeError, ImportError, KeyError, TypeError, ValueError)


def has_messages_inside(params: dict[str, Any]) -> bool:
    """Return True if a jaxpr among the parameters of an equation has messages."""
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (Jaxpr, ClosedJaxpr)) and has_messages(part.effects):
                return True
    return False


# The traces in which a jvp rule is linearized. The rule runs at its place in the program, so its
# known part (the primals) is executed there. In a loop the primals may be loop invariants, which
# other traces would move out of the loop.
_in_place: list[Any] = []


@contextlib.contextmanager
def run_in_place() -> Iterator[None]:
    """Execute the known part of a jvp rule in the current trace."""
    _in_place.append(_trace_context.trace)
    try:
        yield
    finally:
        _in_place.pop()


def is_in_place(trace: Any, tracers: Sequence[Any]) -> bool:
    """Return True if an equation belongs to the known part of such a rule.

    This includes the bodies of loops and branches of the rule, which JAX splits by other traces.
    """
    inside = bool(_in_place) and not _hoisting
    return (inside or any(trace is t for t in _in_place)) and all(t.is_known() for t in tracers)


def stage(primitive: Any, trace: Any, *tracers: Any, **params: Any) -> Any:
    """Put an equation into the unknown part of a program."""
    if is_in_place(trace, tracers):
        return trace.default_process_primitive(primitive, tracers, params)
    unknown = [trace.instantiate_const(t) for t in tracers]
    return trace.default_process_primitive(primitive, unknown, params)


def always_stage(primitive: Primitive) -> None:
    """Never execute `primitive` in the known part of a program, even if all operands are known."""
    partial_eval_rules[primitive] = functools.partial(stage, primitive)


# ---- calls of functions ----

# Not empty while JAX looks for loop invariants. During that time a call with messages is staged as
# a whole. At other times its known part is executed.
_hoisting: list[None] = []


def mark_hoisting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of JAX that looks for loop invariants."""

    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _hoisting.append(None)
        try:
            return plain(*args, **kwargs)
        finally:
            _hoisting.pop()

    return wrapped


def is_hoisting() -> bool:
    """Return True while JAX looks for loop invariants."""
    return bool(_hoisting)


def wrap_call(primitive: Any, n: int, around: Callable[..., Any]) -> None:
    """Let `around(trace, functions, args, equation, proceed)` process the calls of a primitive.

    `functions` are the `n` functions of the call, and `equation` are the parameters of the
    equation that is evaluated (None if the call is not read from a jaxpr). `proceed(functions)` is
    the original processing of JAX.
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
        bind_params = plain(params)
        if isinstance(bind_params, dict):
            return {**bind_params, "equation": params}
        functions, rest = bind_params  # JAX 0.8
        return functions, {**rest, "equation": params}

    takes = len(inspect.signature(bind).parameters)
    if takes not in (3, 4):
        raise UnsupportedJAXError(f"{primitive}.bind_with_trace takes {takes} arguments")
    # In JAX 0.8 the functions stand before the arguments.
    primitive.bind_with_trace = bind_with_trace if takes == 4 else bind_functions_and_args
    primitive.get_bind_params = get_bind_params


# ---- Messages in functions of jax.custom_jvp and jax.custom_vjp ----
#
# Their parts are evaluated by primitives without a rule of abstract evaluation. A function with
# messages is staged as a whole. Its parts run in contexts that allow or forbid messages.


@linear_util.transformation2
def _inside(f: Callable[..., Any], around: Callable[[], Any], rule: bool, *args: Any) -> Any:
    with around(), run_in_place() if rule else contextlib.nullcontext():
        return f(*args)


_CUSTOM_RULES = "custom rules"


def surround_custom_rules(
    function: Callable[[], Any], jvp_rule: Callable[[], Any], vjp_rule: Callable[[], Any]
) -> None:
    """Run the parts of jax.custom_jvp and jax.custom_vjp in these contexts.

    Parameters
    ----------
    function
        The context of the function itself.
    jvp_rule
        The context of the rule of jax.custom_jvp.
    vjp_rule
        The context of the backward rule of jax.custom_vjp.
    """
    rules = {
        jax_primitives.custom_jvp_call_p: (function, jvp_rule),
        jax_primitives.custom_vjp_call_p: (function, None, vjp_rule),
    }
    try:
        for primitive, contexts in rules.items():
            _surround(primitive, contexts, jvp_rule)
        allow_in_custom_rules()  # only now: JAX itself refuses messages in rules without contexts
    except CHANGES as error:
        refuse(_CUSTOM_RULES, f"{type(error).__name__}: {error}")


def _surround(primitive: Any, contexts: Any, jvp_rule: Any) -> None:
    JaxprTrace = private("interpreters.partial_eval.JaxprTrace")

    def around(trace: Any, functions: Any, args: Any, equation: Any, proceed: Any) -> Any:
        if equation is not None and isinstance(trace, JaxprTrace) and has_messages_inside(equation):
            require(_CUSTOM_RULES)
            tracers = [trace.to_jaxpr_tracer(x) for x in args]
            if not is_in_place(trace, tracers):
                return _stage_call(primitive, trace, tracers, equation)
        return proceed(
            part if context is None else _inside(part, context, context is jvp_rule)
            for part, context in zip(functions, contexts, strict=True)
        )

    wrap_call(primitive, len(contexts), around)


def _stage_call(primitive: Any, trace: Any, tracers: Any, params: dict[str, Any]) -> Any:
    """Stage a call without a rule of abstract evaluation, as `stage` does."""
    inputs = [trace.instantiate_const(t) for t in tracers]
    jaxpr, unknown = params["call_jaxpr"], partial_eval.PartialVal.unknown
    outputs = [partial_eval.JaxprTracer(trace, unknown(a), None) for a in jaxpr.out_avals]
    stack = trace._current_truncated_name_stack()
    source = source_info_util.current().replace(name_stack=stack)
    # In JAX 0.10.0 and older all effects are positional.
    has_others = VERSION >= (0, 10, 1)
    kinds = private("core.positional_effects")(jaxpr) if has_others else jaxpr.effects
    new_recipe = private("interpreters.partial_eval.new_eqn_recipe")
    recipe = new_recipe(trace, inputs, outputs, primitive, params, kinds, source)
    handle = private("interpreters.partial_eval.EffectHandle")
    trace.effect_handles.append(handle(inputs, recipe))
    for output in outputs:
        output.recipe = recipe
    return outputs
