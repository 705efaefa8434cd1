"""Errors for derivatives that are global arrays of JAX where a rank's own array is expected."""

from __future__ import annotations

from typing import Any

import jax

from mpigrad.operations._jax_compat import concrete_value

__all__ = ["reject_global_gradients", "reject_global_loss"]


def _is_global(x: Any) -> bool:
    value = concrete_value(x)
    return isinstance(value, jax.Array) and not value.is_fully_addressable


def reject_global_loss(value: Any) -> None:
    """Raise an error if the loss is a sharded global array, which every rank would return."""
    if jax.distributed.is_initialized() and any(map(_is_global, jax.tree.leaves(value))):
        raise ValueError(
            "grad, value_and_grad: the function returned a global array of jax.distributed, but "
            "the loss is the sum of what the ranks return. Return this rank's share: the sum of "
            "mpigrad.from_sharded(values). If all ranks have the value, use mpigrad.from_sharded("
            'value) with loss="replicated".'
        )


def reject_global_gradients(function: str, n: int, argument: Any, gradient: Any) -> None:
    """Raise an error if argument n is of this rank and its gradient is a global array.

    JAX takes an array of a rank that meets a sharded array for one that is the same on all ranks,
    and its gradient is then the sum over all ranks.
    """
    if not jax.distributed.is_initialized():
        return
    pairs = zip(jax.tree.leaves(argument), jax.tree.leaves(gradient), strict=True)
    if any(_is_global(g) and not _is_global(x) for x, g in pairs):
        raise ValueError(
            f"{function}: argument {n} is this rank's array, but it was used with a "
            "sharded array without a conversion, and JAX took it for one that all ranks have. Use "
            "mpigrad.to_sharded(x, mesh, PartitionSpec()) there."
        )
