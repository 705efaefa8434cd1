"""Facts about traced functions of one point: zeros, affine arguments, evaluation at all points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

__all__ = [
    "AtPoints",
    "are_zero",
    "evaluate",
    "is_affine",
    "propagate",
]

# ---- Facts about the arguments of a traced function that are followed to its results ----


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
        facts = [of(v) for v in equation.invars]
        inner = _called_program(equation)
        if inner is not None and len(inner.invars) == len(facts) and not inner.constvars:
            results = propagate(inner, [], facts, of_value, rule)
        else:
            results = [rule(equation, facts)] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _called_program(equation: Any) -> Any:
    """Return the program that an equation calls once, or None."""
    if equation.primitive.name not in ("pjit", "jit", "closed_call", "custom_jvp_call"):
        return None
    program = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(program, "jaxpr", program)


# ---- Find the results of a traced function that are zero, without computing anything ----


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


# ---- Find out whether a traced function is affine in some of its arguments ----


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


# ---- Functions of one point, evaluated at all points of cells or facets ----


@dataclass(frozen=True)
class AtPoints:
    """Values that may differ between cells and between the points of a cell.

    Attributes
    ----------
    array
        Shape (n, q, ...): n is 1 if all cells have the same values, q is 1 if all points have.
    """

    array: jax.Array


def evaluate(function: Callable[..., Any], arguments: Sequence[AtPoints]) -> Any:
    """Apply a function of one point at all points.

    Each result is computed for different cells and points only where it depends on an argument that
    differs between them.

    Parameters
    ----------
    function
        Takes arrays without the axes of cells and points. It returns a pytree of arrays.
    arguments
        Its arguments.

    Returns
    -------
    The pytree with an `AtPoints` for each array, or None for an array that is seen to be zero
    whatever the arguments are (`are_zero`).
    """
    shapes = [jax.ShapeDtypeStruct(a.array.shape[2:], a.array.dtype) for a in arguments]
    closed, result = jax.make_jaxpr(function, return_shape=True)(*shapes)
    leaves, structure = jax.tree.flatten(result)
    zero = are_zero(closed)
    values = [
        None if zero[k] else _at_points(_entry(function, k), arguments, needed, leaf)
        for k, (leaf, needed) in enumerate(zip(leaves, _dependence(closed), strict=True))
    ]
    return jax.tree.unflatten(structure, values)


def _entry(function: Callable[..., Any], k: int) -> Callable[..., Any]:
    """Return the function of array k of the result."""
    return lambda *arguments: jax.tree.leaves(function(*arguments))[k]


def _at_points(
    function: Callable[..., Any], arguments: Sequence[AtPoints], needed: set[int], leaf: Any
) -> AtPoints:
    arrays = [a.array for a in arguments]
    cells, points = (
        [k in needed and arrays[k].shape[axis] != 1 for k in range(len(arrays))] for axis in (0, 1)
    )
    operands = [a if points[k] else a[:, 0] for k, a in enumerate(arrays)]
    operands = [a if cells[k] else a[0] for k, a in enumerate(operands)]
    mapped = function
    if any(points):
        mapped = jax.vmap(mapped, in_axes=[0 if p else None for p in points])
    if any(cells):
        mapped = jax.vmap(mapped, in_axes=[0 if c else None for c in cells])
    result = jnp.asarray(mapped(*operands))
    lengths = (result.shape[: any(cells)], result.shape[any(cells) :][: any(points)])
    n, q = ((*length, 1)[0] for length in lengths)
    return AtPoints(result.reshape(n, q, *leaf.shape))


def _dependence(closed: Any) -> list[set[int]]:
    """Return for each result of a traced function the arguments on which it may depend."""
    jaxpr = closed.jaxpr
    consts: list[set[int]] = [set() for _ in jaxpr.constvars]
    inputs = [{k} for k in range(len(jaxpr.invars))]
    return propagate(jaxpr, consts, inputs, lambda _: set(), lambda _, sets: set().union(*sets))
