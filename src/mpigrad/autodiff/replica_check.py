"""The comparison of replicated arguments, in the message that sums their gradients.

Rank r contributes c[r] s[r], with s[r] a weighted sum of the entries of its argument, and with
coefficients c whose sum over ranks is zero. So the total is zero, up to rounding, if all ranks have
the same argument. The total travels with the gradients and needs no message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.communicator import Communicator
from mpigrad.operations.checks import require
from mpigrad.operations.kept_array import rank_value
from mpigrad.operations.local_programs import as_array

__all__ = ["contribution", "require_replicated"]


def contribution(argument: Any, comm: Communicator) -> jax.Array:
    """Return this rank's part of the total and of its scale, of shape (2,)."""
    coefficients = [1 + rank / comm.size for rank in range(comm.size)]
    coefficients[0] = -sum(coefficients[1:])
    leaves = [jax.lax.stop_gradient(as_array(leaf)) for leaf in jax.tree.leaves(argument)]
    inexact = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return _sums(inexact, rank_value(coefficients, comm))


# Eager operators would be compiled one by one.
@jax.jit
def _sums(leaves: list[jax.Array], coefficient: jax.Array) -> jax.Array:
    parts = [p for x in leaves for p in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]
    dtype = jnp.result_type("float32", *(part.dtype for part in parts))
    sums = jnp.zeros(2, dtype)
    for part in parts:
        # Weights between 1 and 2: unweighted, x and -x may have the same sum, zero.
        weights = 1 + jnp.arange(part.size, dtype=dtype) * 0.618034 % 1
        weighted = part.astype(dtype).ravel() * weights
        sums += jnp.stack([jnp.sum(weighted), jnp.sum(jnp.abs(weighted))])
    return sums * jnp.stack([coefficient, jnp.abs(coefficient)]).astype(dtype)


def require_replicated(
    sums: Sequence[jax.Array], numbers: Sequence[int], comm: Communicator
) -> None:
    """Raise an error on all ranks if an argument differs, from the sums of the contributions."""
    for total, n in zip(sums, numbers, strict=True):
        same, difference = _verdict(total)
        require(
            same,
            f"grad, value_and_grad: argument {n}, declared replicated, is not the same on all "
            f"{comm.size} ranks (relative difference {{}}). Make it equal, for instance by bcast, "
            "or do not declare it replicated. MPIGRAD_GUARD=1 names the ranks.",
            difference,
            comm=comm,
        )


@jax.jit
def _verdict(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    difference = jnp.abs(sums[0]) / jnp.where(sums[1] > 0, sums[1], 1)
    return ~(difference > 64 * jnp.finfo(sums.dtype).eps), difference  # NaN is not different
