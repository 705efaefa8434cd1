"""Find the results of a traced function that are zero, without computing anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

__all__ = ["are_zero", "called_program"]

# Primitives whose result is zero if all arguments are, if one of them is, or if the first one is.
_ALL = {
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "neg",
    "pad", "reduce_sum", "reshape", "rev", "slice", "split", "squeeze", "sub", "transpose",
}  # fmt: skip
_ANY = {"dot_general", "mul"}
_FIRST = {"div", "dynamic_slice", "gather"}


def are_zero(closed: Any) -> list[bool]:
    """Return True for each result of a traced function that is seen to be zero.

    JAX writes zeros into derivatives of functions that do not depend on an argument. These are
    found. A result for which False is returned may still be zero.
    """
    jaxpr = closed.jaxpr
    consts = [_is_zero(value) for value in closed.consts]
    return _propagate(jaxpr, consts, [False] * len(jaxpr.invars))


def _propagate(jaxpr: Any, consts: Sequence[bool], inputs: Sequence[bool]) -> list[bool]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def of(variable: Any) -> bool:
        return _is_zero(variable.val) if hasattr(variable, "val") else known.get(variable, False)

    for equation in jaxpr.eqns:
        zero, name = [of(v) for v in equation.invars], equation.primitive.name
        inner = called_program(equation)
        if inner is not None and len(inner.invars) == len(zero) and not inner.constvars:
            results = _propagate(inner, [], zero)
        else:
            result = (
                (name in _ALL and all(zero))
                or (name in _ANY and any(zero))
                or (name in _FIRST and zero[0])
                or (name == "select_n" and all(zero[1:]))
            )
            results = [result] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _is_zero(value: Any) -> bool:
    if isinstance(value, Tracer):
        return False
    value = np.asarray(value)
    return value.dtype.kind in "biufc" and not np.any(value)


def called_program(equation: Any) -> Any:
    """Return the program that an equation calls once, or None."""
    if equation.primitive.name not in ("pjit", "jit", "closed_call", "custom_jvp_call"):
        return None
    program = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(program, "jaxpr", program)
