"""Local parts of functions between messages: few programs, on every rank, at their place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.carrier import carrier, tie_in, without_carriers
from mpigrad.operations.primitive import linear_map
from mpigrad.runtime.call_sites import call_site

__all__ = [
    "as_array",
    "index_array",
    "jit_local",
    "keep_in_order",
    "put",
    "take",
]

# ---- The local parts of functions as few compiled programs, also outside of `jit` ----
#
# Outside of `jit` JAX compiles a program for each operation of `jax.numpy`, and again for each
# new shape, in about 10 ms. `jnp.asarray` of a NumPy array is such an operation.


def as_array(x: Any, dtype: Any = None) -> jax.Array:
    """Return `jnp.asarray(x, dtype)`, without compiling if `x` is a JAX or a NumPy array."""
    if isinstance(x, Tracer):  # its value may be a Python number
        return jnp.asarray(x, dtype)
    if isinstance(x, jax.Array) and (dtype is None or x.dtype == dtype):
        return x
    if type(x) is np.ndarray and x.dtype.kind in "fiubc" and compat.is_top_level():
        to = jax.dtypes.canonicalize_dtype(x.dtype if dtype is None else dtype)
        if x.dtype == to or (x.dtype.kind == to.kind and to.kind in "fc"):
            return jax.device_put(np.array(x, to))  # a copy: JAX would share memory with `x`
    return jnp.asarray(x, dtype)


def jit_local(
    f: Callable[..., Any] | None = None,
    *,
    static_argnames: tuple[str, ...] = (),
    inline: bool = False,
) -> Callable[..., Any]:
    """Compile a function without messages as one program, traced once for all transformations.

    If it has several results, they must depend on the same operands: where JAX transposes a linear
    function, it takes all results of a program as linear if one operand is.

    Parameters
    ----------
    f
        The function. If it is left out, the result is a decorator.
    static_argnames, inline
        As for `jax.jit`. With `inline` XLA copies fewer large arrays between native handlers and
        this function, as it chooses layouts before it merges programs.
    """
    if f is None:
        return functools.partial(jit_local, static_argnames=static_argnames, inline=inline)
    program = jax.jit(f, static_argnames=static_argnames, inline=inline)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        with without_carriers():
            return program(*args, **kwargs)

    return call


# ---- Array indexing that stays active and batched on a rank without indices ----
#
# JAX turns x[[]], and an empty `at[].add`, into a constant that depends on nothing. A message of
# this constant would neither be batched nor be differentiated with the messages of the other
# ranks.


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


def index_array(indices: np.ndarray) -> jax.Array:
    """Put indices on the device, in 32 bits if they fit, as a constant even inside a trace."""
    small = indices.size == 0 or int(indices.max()) < 2**31
    with jax.ensure_compile_time_eval(), jax.enable_x64(not small):
        return as_array(indices.astype(np.int32 if small else np.int64))


# ---- A place in the order of messages for a computation: before one message, after another ----


def _transpose(ct: Any, x: Any, a: Any, **params: Any) -> Any:
    return in_order_p.bind(ct, a, **params)[0]


in_order_p: Primitive = linear_map(
    "in_order",
    result=lambda x, **_: ShapedArray(x.shape, x.dtype),
    in_place=True,
    transpose=_transpose,
)


def keep_in_order(tree: Any) -> Any:
    """Return the same values, computed after the messages before and before the messages after.

    Compiled programs keep the messages in order, and compute in any order that their data allow.
    The operand is computed before the messages that follow, the results after the messages that
    precede. The derivative keeps the reverse order. If the operand is not needed again, no copy is
    made.

    Parameters
    ----------
    tree
        Array or pytree of arrays.
    """
    a, site = carrier(), call_site()
    return jax.tree.map(lambda x: in_order_p.bind(x, a, site=site)[0], tree)
