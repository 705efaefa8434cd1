"""Derivatives of a function of few numbers, by forward mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

__all__ = ["by_forward_mode"]


def by_forward_mode(f: Callable[..., Array]) -> Callable[..., Array]:
    """`f(x, *data)` with derivatives of any order in x, in both modes, by forward mode alone.

    For an `f` of few numbers that is costly, or impossible, to reverse, as an adaptive integration
    is: value and Jacobian are computed in one pass, and reverse mode multiplies by the Jacobian.

    Parameters
    ----------
    f
        Function of x, shape (n,), and data, to an array of any shape; it has a forward mode.

    Returns
    -------
    A function like `f`. A derivative in its data is refused with a TypeError.
    """

    @jax.custom_jvp
    def function(x: Array, *data: Any) -> Array:
        return f(x, *data)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
        dx, *others = tangents
        if not all(isinstance(tangent, SymbolicZero) for tangent in jax.tree.leaves(others)):
            raise TypeError("by_forward_mode: its derivative is in x; another operand varies, too")
        # The pair has such derivatives as well: any order.
        both = by_forward_mode(functools.partial(_value_and_jacobian, f))(*primals)
        return both[..., 0], both[..., 1:] @ dx

    return function


def _value_and_jacobian(f: Callable[..., Array], x: Array, *data: Any) -> Array:
    """f(x) and its Jacobian side by side: the shape of f(x), and an axis of 1 + n at its end."""

    def along(direction: Array) -> tuple[Array, Array]:
        return jax.jvp(lambda x: f(x, *data), (x,), (direction,))

    directions = jnp.eye(x.size, dtype=x.dtype)
    value, slopes = jax.vmap(along, out_axes=(None, -1))(directions)
    return jnp.concatenate([value[..., None], slopes], axis=-1)
