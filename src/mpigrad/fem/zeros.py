"""Find the results of a traced function that are zero, without computing anything."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.core import Tracer

from mpigrad.fem.propagation import propagate

__all__ = ["are_zero"]

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
    return propagate(jaxpr, consts, [False] * len(jaxpr.invars), _is_zero, _rule)


def _rule(equation: Any, zero: list[bool]) -> bool:
    name = equation.primitive.name
    return (
        (name in _ALL and all(zero))
        or (name in _ANY and any(zero))
        or (name in _FIRST and zero[0])
        or (name == "select_n" and all(zero[1:]))
    )


def _is_zero(value: Any) -> bool:
    if isinstance(value, Tracer):
        return False
    value = np.asarray(value)
    return value.dtype.kind in "biufc" and not np.any(value)
