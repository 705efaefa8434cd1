"""Checks of values in compiled programs, which end the program with an error."""

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
from mpigrad.operations.local_programs import as_array, jit_local
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
    """End the program with an error unless `ok` is true.

    The error names the rank and the user's source line. To let all ranks fail together, compute
    `ok` from values that are equal on all ranks, for example the result of an `allreduce`.

    Parameters
    ----------
    ok
        Boolean scalar.
    message
        The problem and the remedy. Each "{}" is replaced by one of `values`.
    values
        Real scalars.
    comm
        The communicator that the error names. Default: the communicator of the enclosing `with`, or
        all ranks.

    Raises
    ------
    jax.errors.JaxRuntimeError
        When the program runs, on each rank on which `ok` is false.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> x = jnp.float32(2)
    >>> mg.require(x > 0, "step: x must be positive, got {}. Choose a smaller step.", x)
    """
    with jax.enable_x64(True):  # the handler's type in any precision of the program
        holds, packed = _numbers(ok, values)
        require_p.bind(
            holds,
            packed,
            carrier(),
            comm=resolve(comm).slot,
            site=call_site(),
            message=message,
        )


@jit_local
def _numbers(ok: Any, values: Any) -> tuple[jax.Array, jax.Array]:
    numbers = [jax.lax.stop_gradient(jnp.asarray(v)).astype("float64") for v in values]
    packed = jnp.stack(numbers) if numbers else jnp.zeros(0, "float64")
    return jnp.asarray(ok, bool).reshape(()), packed


def assert_replicated(
    x: Any,
    comm: Communicator | None = None,
    *,
    what: str = "the value",
    remedy: str = "Make it equal, for instance by bcast, or do not declare it replicated.",
) -> None:
    """Raise an error on every rank unless `x` is equal on all ranks, up to rounding.

    NaN is equal to NaN.

    Parameters
    ----------
    x
        Array or pytree of arrays. An array of another shape or dtype differs "by inf". MPI itself
        may raise an error before that, if it receives a longer message than expected.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.
    what
        The name of `x` in the error.
    remedy
        The last sentence of the error.

    Raises
    ------
    jax.errors.JaxRuntimeError
        On every rank, with the number of ranks that differ from rank 0 and the largest difference.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.assert_replicated(mg.bcast(jnp.arange(3.0)))
    """
    comm = resolve(comm)
    leaves = [jax.lax.stop_gradient(as_array(leaf)) for leaf in jax.tree.leaves(x)]
    if comm.size == 1 or not leaves:
        return
    layout = zlib.crc32(repr([(leaf.shape, leaf.dtype.name) for leaf in leaves]).encode())
    halves = np.array(divmod(layout, 1 << 16), "float32")  # float32 has both exactly
    flags = allgather(_comparison(leaves, bcast(leaves, 0, comm), halves), comm)
    same, number, first, deviation = _verdict(flags)
    require(
        same,
        f"{what} is not the same on all ranks: {{}} of {comm.size} ranks differ from rank 0. "
        f"The first of them is rank {{}} (by {{}}). {remedy}",
        number,
        first,
        deviation,
        comm=comm,
    )


# Eager operators would be compiled one by one. These two functions are compiled as a whole.
@jax.jit
def _comparison(leaves: list[jax.Array], roots: list[jax.Array], layout: Any) -> jax.Array:
    """Return 1 if leaves differ, the largest difference, and the layout in two numbers."""
    differs = jnp.zeros((), bool)
    deviation = jnp.zeros((), "float32")
    for leaf, root in zip(leaves, roots, strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            eps = float(jnp.finfo(leaf.dtype).eps)
            tolerance = min(1e3 * eps, math.sqrt(eps))  # 1e3 eps is too large in half precision
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
    """Return if all ranks are equal, how many differ, the first of them, and its difference."""
    layouts = jnp.any(flags[:, 2:] != flags[:1, 2:], axis=1)
    differs = (flags[:, 0] > 0) | layouts
    first = jnp.argmax(differs)
    by = jnp.where(layouts[first], jnp.inf, flags[first, 1])
    return ~jnp.any(differs), jnp.sum(differs), first, by
