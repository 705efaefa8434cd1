"""Array indexing that stays active and batched on a rank without indices.

JAX turns x[[]], and an empty `at[].add`, into a constant that depends on nothing. A message of this
constant would neither be batched nor be differentiated with the messages of the other ranks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.operations.carrier import tie_in
from mpigrad.operations.local_programs import jit_local

__all__ = ["put", "take"]


@jit_local(static_argnames=("unique",))
def take(x: jax.Array, index: Any, unique: bool = False) -> jax.Array:
    """Return x[index] along the leading axis. All indices must be in bounds."""
    if not len(index):
        return jax.lax.slice_in_dim(x, 0, 0).reshape(*index.shape, *x.shape[1:])
    return x.at[index].get(
        mode="promise_in_bounds", wrap_negative_indices=False, unique_indices=unique
    )


@jit_local(static_argnames=("n",))
def put(n: int, index: Any, values: jax.Array) -> jax.Array:
    """Add `values` at `index` to `n` zeros. All indices must be in bounds."""
    zeros = jnp.zeros(n, values.dtype)
    if not len(index):
        return tie_in(zeros, values)
    return zeros.at[index].add(values, mode="promise_in_bounds", wrap_negative_indices=False)
