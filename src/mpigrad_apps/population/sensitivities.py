"""Derivatives of a function of few variables by forward mode."""

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
    """Give `f(x, *data)` derivatives of any order in x, in both modes, by forward mode only.

    Use it for a function of few variables that is costly or impossible to differentiate in reverse
    mode, such as an adaptive integration. One pass computes the value and the Jacobian, and reverse
    mode multiplies by the Jacobian.

    Parameters
    ----------
    f
        Function of x, shape (n,), and data. It returns an array and supports forward mode.

    Returns
    -------
    A function with the arguments of `f`. A derivative with respect to its data is a TypeError.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from mpigrad_apps.population import by_forward_mode
    >>> loop = by_forward_mode(
    ...     lambda x: jax.lax.while_loop(lambda y: jnp.sum(y) < 10, lambda y: 2 * y, x)
    ... )
    >>> jax.jacrev(loop)(jnp.array([1.0, 2.0])).tolist()
    [[4.0, 0.0], [0.0, 4.0]]
    """

    @jax.custom_jvp
    def function(x: Array, *data: Any) -> Array:
        return f(x, *data)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
        dx, *others = tangents
        if not all(isinstance(tangent, SymbolicZero) for tangent in jax.tree.leaves(others)):
            raise TypeError(
                "by_forward_mode: expected a derivative with respect to x only, but another "
                "operand varies, too. Move it into x, or use jax.lax.stop_gradient."
            )
        # The pair of value and Jacobian has such derivatives, too: derivatives of any order.
        both = by_forward_mode(functools.partial(_value_and_jacobian, f))(*primals)
        return both[..., 0], both[..., 1:] @ dx

    return function


def _value_and_jacobian(f: Callable[..., Array], x: Array, *data: Any) -> Array:
    """Return f(x) and its Jacobian, stacked along a last axis of length 1 + n."""

    def along(direction: Array) -> tuple[Array, Array]:
        return jax.jvp(lambda x: f(x, *data), (x,), (direction,))

    directions = jnp.eye(x.size, dtype=x.dtype)
    value, slopes = jax.vmap(along, out_axes=(None, -1))(directions)
    return jnp.concatenate([value[..., None], slopes], axis=-1)
