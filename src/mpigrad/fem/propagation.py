"""Facts about the arguments of a traced function that are followed to its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["propagate"]


def propagate(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    of_value: Callable[[Any], Any],
    rule: Callable[[Any, list[Any]], Any],
) -> list[Any]:
    """Return the facts about the results of a traced function, without computing anything.

    Parameters
    ----------
    jaxpr
        The program, a `Jaxpr`.
    consts, inputs
        The facts about its constants and its arguments.
    of_value
        Value of a literal -> fact.
    rule
        (equation of the program, facts about its arguments) -> the fact about its results.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def of(variable: Any) -> Any:
        return of_value(variable.val) if hasattr(variable, "val") else known[variable]

    for equation in jaxpr.eqns:
        given = [of(v) for v in equation.invars]
        inner = _called_program(equation)
        if inner is not None and len(inner.invars) == len(given) and not inner.constvars:
            results = propagate(inner, [], given, of_value, rule)
        else:
            results = [rule(equation, given)] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _called_program(equation: Any) -> Any:
    """Return the program that an equation calls once, or None."""
    if equation.primitive.name not in ("pjit", "jit", "closed_call", "custom_jvp_call"):
        return None
    program = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(program, "jaxpr", program)
