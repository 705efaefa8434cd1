"""Activity is collective: the hidden carrier that keeps every message active on every rank.

JAX calls no derivative rule where an operand is constant, and whether an operand is constant may
differ from rank to rank. Every message therefore has one more operand, a scalar whose value is
never used. `mpigrad.grad` and its kin make it an argument of the differentiated function, so that
it has a tangent, and with it every message, on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir, visible

__all__ = ["CARRIER", "carrier", "nought", "with_carrier", "without_carriers"]

CARRIER = ShapedArray((), np.dtype("float32"))

# The carriers of the enclosing transformations, as keys: the context is part of JAX's cache keys,
# so that a function traced under one carrier is not reused under another.
_context = jax.make_user_context(())
_carriers: dict[int, Any] = {}
_keys = itertools.count(1)


def carrier() -> Any:
    """The carrier of the innermost enclosing transformation, or a constant."""
    for key in reversed(_context.value):
        if visible(_carriers[key]):
            return _carriers[key]
    return np.float32(0)


@contextlib.contextmanager
def _active(value: Any) -> Iterator[None]:
    if not isinstance(value, Tracer):
        yield
        return
    key = next(_keys)
    _carriers[key] = value
    try:
        with _context((*_context.value, key)):
            yield
    finally:
        del _carriers[key]


def with_carrier(f: Callable[..., Any]) -> Callable[..., Any]:
    """f(*args) as g(c, *args), in which every message depends on c (with derivative zero)."""

    def g(c: Any, *args: Any, **kwargs: Any) -> Any:
        with _active(c + carrier()):
            return f(*args, **kwargs)

    return g


@contextlib.contextmanager
def without_carriers() -> Iterator[None]:
    """A context in which caches do not depend on the enclosing transformations."""
    with _context(()):
        yield


# ---- a linear map that is zero, which JAX cannot see through: it carries activity, not values ----

nought_p = Primitive("mpigrad_nought")


def nought(x: Any, aval: Any) -> Any:
    """A zero of the shape and dtype of `aval` that depends linearly on `x`."""
    return nought_p.bind(x, shape=tuple(aval.shape), dtype=np.dtype(aval.dtype))


def _zeros(x: Any, *, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return jnp.zeros(shape, dtype)


def _transpose(ct: Any, x: Any, *, shape: tuple[int, ...], dtype: np.dtype) -> list[Any]:
    return [nought(ct, x.aval)]


def _batch(args: Any, dims: Any, *, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    # It stays batched: ranks must agree about batching, too.
    n = args[0].shape[dims[0]]
    return nought_p.bind(args[0], shape=(n, *shape), dtype=dtype), 0


nought_p.def_impl(_zeros)
nought_p.def_abstract_eval(lambda x, *, shape, dtype: ShapedArray(shape, dtype))
mlir.register_lowering(nought_p, mlir.lower_fun(_zeros, multiple_results=False))
ad.deflinear2(nought_p, _transpose)
batching.primitive_batchers[nought_p] = _batch
