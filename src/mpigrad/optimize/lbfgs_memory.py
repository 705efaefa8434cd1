"""The memory of L-BFGS: rows of vectors, which are overwritten in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mpigrad.optimize.unknowns import Unknowns, Vector, product

__all__ = ["combine", "empty", "remember", "remember_pair"]


def empty(x: Vector, rows: int) -> Vector:
    """Return rows of zeros."""
    return tuple(jnp.zeros((rows, *part.shape), part.dtype) for part in x)


@jax.jit
def _combine(rows: Vector, coefficients: Any, g: Vector, of_g: Any) -> Vector:
    def one(a: Any, b: Any) -> Any:
        c = jnp.asarray(coefficients, b.dtype)
        return jnp.tensordot(c, a, 1) + jnp.asarray(of_g, b.dtype) * b

    return tuple(one(a, b) for a, b in zip(rows, g, strict=True))


def combine(rows: Vector, coefficients: NDArray[np.float64], g: Vector, of_g: float) -> Vector:
    """Return the combination of the rows and g with these coefficients, without messages."""
    return _combine(rows, coefficients, g, of_g)


def _remember(
    unknowns: Unknowns, rows: Vector, slot: Any, direction: Vector, t: Any, old: Vector, new: Vector
) -> Any:
    products, changed = [], []
    for part, d, g_old, g in zip(rows, direction, old, new, strict=True):
        y = g - g_old
        with_s = part.at[slot].set(jnp.asarray(t, d.dtype) * d)
        with_both = with_s.at[part.shape[0] // 2 + slot].set(y)
        flat = with_both.reshape(part.shape[0], -1)
        products.append(_products(flat, y.ravel(), g.ravel(), slot))
        changed.append(with_both)
    with jax.enable_x64(True):
        return tuple(changed), unknowns.sum(functools.reduce(jnp.add, products))


def _remember_pair(
    unknowns: Unknowns, rows: Vector, slot: Any, direction: Vector, t: Any, old: Vector, new: Vector
) -> Any:
    products, changed = [], []
    for part, d, g_old, g in zip(rows, direction, old, new, strict=True):
        s, y = jnp.asarray(t, d.dtype) * d, g - g_old
        with_both = part.at[slot].set(s).at[part.shape[0] // 2 + slot].set(y)
        flat = with_both.reshape(part.shape[0], -1)
        products.append(_products(flat, s.ravel(), y.ravel(), slot))
        changed.append(with_both)
    with jax.enable_x64(True):
        return tuple(changed), unknowns.sum(functools.reduce(jnp.add, products))


def _products(rows: Any, y: Any, g: Any, slot: Any) -> Any:
    """Return the inner products of the rows with y and g, in float64 (as `unknowns.dot`)."""
    with jax.enable_x64(True):
        plain = jnp.stack([rows @ y, rows @ g]).astype("float64")
        if rows.dtype == np.dtype("float64"):
            return plain
        # Rows that are not in use yet are zero, so only the newest rows are tested.
        newest = plain[:, jnp.stack([slot, rows.shape[0] // 2 + slot])]
        safe = jnp.all(jnp.abs(newest) > 1e-20) & jnp.all(jnp.isfinite(plain))

        def exactly() -> Any:
            # Row by row: all rows in float64 would need twice the memory of the rows.
            def one(row: Any) -> Any:
                return jnp.stack([product(row, y), product(row, g)])

            return jax.lax.map(one, rows).T

        return jax.lax.cond(safe, lambda: plain, exactly)


def remember(
    unknowns: Unknowns,
    rows: Vector,
    slot: int,
    direction: Vector,
    t: float,
    old: Vector,
    new: Vector,
) -> tuple[Vector, NDArray[np.float64]]:
    """Store s = t · direction and y = new - old in their rows (collective).

    The arrays of `rows` are reused and invalid afterwards.

    Returns
    -------
    The rows, and their inner products with y and with `new`, of shape (2, count of rows).
    """
    program = unknowns.compiled(_remember, donate_argnums=0)
    rows, products = program(rows, slot, direction, t, old, new)
    return rows, np.asarray(products, np.float64)


def remember_pair(
    unknowns: Unknowns,
    rows: Vector,
    slot: int,
    direction: Vector,
    t: float,
    old: Vector,
    new: Vector,
) -> tuple[Vector, NDArray[np.float64]]:
    """Store s and y as `remember` does. Return the rows, and their products with s and with y."""
    program = unknowns.compiled(_remember_pair, donate_argnums=0)
    rows, products = program(rows, slot, direction, t, old, new)
    return rows, np.asarray(products, np.float64)
