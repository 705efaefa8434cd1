"""Messages in functions of jax.custom_jvp and jax.custom_vjp.

Their parts are evaluated by primitives without a rule of abstract evaluation. A function with
messages is staged as a whole. Its parts run in contexts that allow or forbid messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from jax.extend import linear_util, source_info_util
from jax.extend.core import primitives as jax_primitives

from mpigrad.operations._jax_compat import allow_in_custom_rules
from mpigrad.operations._jax_private import VERSION, private, refuse, require
from mpigrad.operations._jax_staging import (
    CHANGES,
    has_messages_inside,
    is_in_place,
    partial_eval,
    run_in_place,
    wrap_call,
)

__all__ = ["surround_custom_rules"]


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
