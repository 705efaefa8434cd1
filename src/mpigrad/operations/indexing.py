"""Entries of arrays by index, where a rank may have none.

JAX makes of x[[]], and of an empty `at[].add`, a constant that depends on nothing. A message of it
would be neither batched nor differentiated with those of the other ranks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.operations.carrier import follow

__all__ = ["put", "take"]


def take(x: jax.Array, index: Any, unique: bool = False) -> jax.Array:
    """x[index] along the leading axis, all of them in bounds."""
    if not len(index):
        return jax.lax.slice_in_dim(x, 0, 0).reshape(*index.shape, *x.shape[1:])
    return x.at[index].get(
        mode="promise_in_bounds", wrap_negative_indices=False, unique_indices=unique
    )


def put(n: int, index: Any, values: jax.Array) -> jax.Array:
    """`n` zeros to which `values` are added at `index`, all of them in bounds."""
    zeros = jnp.zeros(n, values.dtype)
    if not len(index):
        return follow(zeros, values)
    return zeros.at[index].add(values, mode="promise_in_bounds", wrap_negative_indices=False)
