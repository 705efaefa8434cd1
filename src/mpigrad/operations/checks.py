"""Checks of values inside compiled programs, which end the program with a message."""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import Communicator, resolve
from mpigrad.operations._jax_compat import Primitive
from mpigrad.operations.carrier import carrier
from mpigrad.operations.collectives import allgather, bcast
from mpigrad.operations.primitive import effect_primitive
from mpigrad.runtime.call_sites import call_site

__all__ = ["assert_replicated", "require"]


def _one_call(args: Any, dims: Any, params: dict[str, Any]) -> tuple[Any, ...]:
    # A batch fails with the values of its first failing member.
    ok, values, a = args
    n = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
    front = [
        jnp.broadcast_to(v, (n, *v.shape)) if d is None else jnp.moveaxis(v, d, 0)
        for v, d in zip((ok, values), dims[:2], strict=True)
    ]
    return jnp.all(front[0]), front[1][jnp.argmin(front[0])], jnp.sum(a)


require_p: Primitive = effect_primitive("require", operands=2, batch=_one_call)


def require(ok: Any, message: str, *values: Any, comm: Communicator | None = None) -> None:
    """Go on where `ok` is true, else end the program with an error.

    The error names the rank and the user's source line. To let all ranks fail together, decide
    `ok` from values that are equal on all of them (after an `allreduce`, say).

    Parameters
    ----------
    ok
        Boolean scalar.
    message
        What is wrong, and what to do; each "{}" is replaced by one of `values`.
    values
        Real scalars.
    """
    with jax.enable_x64(True):  # the handler's type, whatever the program's precision
        numbers = [jax.lax.stop_gradient(jnp.asarray(v)).astype("float64") for v in values]
        packed = jnp.stack(numbers) if numbers else jnp.zeros(0, "float64")
        require_p.bind(
            jnp.asarray(ok, bool).reshape(()),
            packed,
            carrier(),
            comm=resolve(comm).slot,
            site=call_site(),
            message=message,
        )


def assert_replicated(
    x: Any,
    comm: Communicator | None = None,
    what: str = "the value",
    remedy: str = "Make it equal, for instance by bcast, or do not declare it replicated.",
) -> None:
    """Raise on every rank unless `x` is equal on all ranks (up to rounding; NaN equals NaN).

    Parameters
    ----------
    x
        Array or pytree of arrays. One of another shape or dtype differs "by inf", if MPI does not
        refuse it before: it takes a shorter message for a longer one.
    what, remedy
        What the error calls `x`, and what it says to do.
    """
    comm = resolve(comm)
    leaves = [jax.lax.stop_gradient(jnp.asarray(leaf)) for leaf in jax.tree.leaves(x)]
    if comm.size == 1 or not leaves:
        return
    layout = zlib.crc32(repr([(leaf.shape, leaf.dtype.name) for leaf in leaves]).encode())
    halves = np.array(divmod(layout, 1 << 16), "float32")  # which that holds exactly
    flags = allgather(_comparison(leaves, bcast(leaves, 0, comm), halves), comm)
    same, number, first, deviation = _verdict(flags)
    require(
        same,
        f"{what} is not the same on all ranks: {{}} of {comm.size} ranks differ from rank 0, "
        f"the first is rank {{}} (by {{}}). {remedy}",
        number,
        first,
        deviation,
        comm=comm,
    )


# Outside of a compiled program each operator is one of its own, to be compiled: these two are not.
@jax.jit
def _comparison(leaves: list[jax.Array], roots: list[jax.Array], layout: Any) -> jax.Array:
    """1 where any two differ, the largest difference, and two numbers of the layout: float32[4]."""
    differs = jnp.zeros((), bool)
    deviation = jnp.zeros((), "float32")
    for leaf, root in zip(leaves, roots, strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            eps = float(jnp.finfo(leaf.dtype).eps)
            tolerance = min(1e3 * eps, math.sqrt(eps))  # of half precision 1e3 eps is anything
            same = (jnp.abs(leaf - root) <= tolerance * jnp.abs(root)) | (leaf == root)
            same |= jnp.isnan(leaf) & jnp.isnan(root)
            distance = jnp.abs(leaf - root).astype("float32")
        else:
            same = leaf == root
            distance = (~same).astype("float32")
        differs |= ~jnp.all(same)
        deviation = jnp.maximum(deviation, jnp.max(distance, initial=0.0))
    return jnp.concatenate([jnp.stack([differs.astype("float32"), deviation]), layout])


@jax.jit
def _verdict(flags: jax.Array) -> tuple[jax.Array, ...]:
    """Of all comparisons: whether nobody differs, how many do, who first, by what."""
    layouts = jnp.any(flags[:, 2:] != flags[:1, 2:], axis=1)
    differs = (flags[:, 0] > 0) | layouts
    first = jnp.argmax(differs)
    by = jnp.where(layouts[first], jnp.inf, flags[first, 1])
    return ~jnp.any(differs), jnp.sum(differs), first, by
