"""Find out whether a traced function is affine in some of its arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpigrad.fem.propagation import propagate

__all__ = ["is_affine"]

_FIXED, _AFFINE, _OTHER = 0, 1, 2  # does not depend on the arguments, is affine, is anything else
_LINEAR = {
    "add", "add_any", "broadcast_in_dim", "concatenate", "copy", "cumsum", "neg", "pad",
    "reduce_sum", "reshape", "rev", "slice", "split", "squeeze", "sub", "transpose",
}  # fmt: skip
_BILINEAR = {"conv_general_dilated", "dot_general", "mul"}
# Linear in the arguments at these places, if all others are fixed.
_PLACES = {"div": (0,), "dynamic_slice": (0,), "dynamic_update_slice": (0, 1), "gather": (0,)}
_PLACES["select_n"] = (1, 2)
_PLACES["scatter-add"] = _PLACES["scatter_add"] = _PLACES["scatter"] = (0, 2)


def is_affine(closed: Any, arguments: set[int]) -> bool:
    """Return True if all results of a traced function are seen to be affine in these arguments.

    A function for which False is returned may still be affine.
    """
    jaxpr = closed.jaxpr
    consts = [_FIXED] * len(jaxpr.constvars)
    kinds = [_AFFINE if k in arguments else _FIXED for k in range(len(jaxpr.invars))]
    results = propagate(jaxpr, consts, kinds, lambda _: _FIXED, _kind)
    return max(results, default=_FIXED) <= _AFFINE


def _kind(equation: Any, kinds: list[int]) -> int:
    worst, name = max(kinds, default=_FIXED), equation.primitive.name
    if worst != _AFFINE or name in _LINEAR:
        return worst
    if name == "convert_element_type":  # not to integers
        return _AFFINE if np.issubdtype(equation.params["new_dtype"], np.inexact) else _OTHER
    if name in _BILINEAR:
        return _AFFINE if sum(k == _AFFINE for k in kinds) == 1 else _OTHER
    places = _PLACES.get(name, ())
    return _AFFINE if all(k in places for k, kind in enumerate(kinds) if kind) else _OTHER
