"""Functions of one point, evaluated at all points of cells or facets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.fem.propagation import propagate
from mpigrad.fem.zeros import are_zero

__all__ = ["AtPoints", "evaluate"]


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
    return lambda *given: jax.tree.leaves(function(*given))[k]


def _at_points(
    function: Callable[..., Any], arguments: Sequence[AtPoints], needed: set[int], leaf: Any
) -> AtPoints:
    arrays = [a.array for a in arguments]
    cells, points = (
        [k in needed and arrays[k].shape[axis] != 1 for k in range(len(arrays))] for axis in (0, 1)
    )
    given = [a if points[k] else a[:, 0] for k, a in enumerate(arrays)]
    given = [a if cells[k] else a[0] for k, a in enumerate(given)]
    mapped = function
    if any(points):
        mapped = jax.vmap(mapped, in_axes=[0 if p else None for p in points])
    if any(cells):
        mapped = jax.vmap(mapped, in_axes=[0 if c else None for c in cells])
    result = jnp.asarray(mapped(*given))
    lengths = (result.shape[: any(cells)], result.shape[any(cells) :][: any(points)])
    n, q = ((*length, 1)[0] for length in lengths)
    return AtPoints(result.reshape(n, q, *leaf.shape))


def _dependence(closed: Any) -> list[set[int]]:
    """Return for each result of a traced function the arguments on which it may depend."""
    jaxpr = closed.jaxpr
    consts: list[set[int]] = [set() for _ in jaxpr.constvars]
    inputs = [{k} for k in range(len(jaxpr.invars))]
    return propagate(jaxpr, consts, inputs, lambda _: set(), lambda _, given: set().union(*given))
