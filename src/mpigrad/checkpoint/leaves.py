"""Conversion between the leaves of a tree and NumPy arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "dtype_of",
    "is_kind",
    "is_number",
    "kind_of",
    "local_shape",
    "parse",
    "text_of",
    "to_host",
    "to_leaf",
]

# Python numbers are written as text, which is exact for any length. A NumPy scalar of a subclass of
# a Python type (float64 is one) is written in the same way, so that either can be read.
_PYTHON = {
    bool: lambda text: text == "True",
    int: int,
    float: float,
    complex: complex,
}


def kind_of(leaf: Any) -> str:
    """Return the dtype of a leaf, "key<...>" for JAX's random keys, or "Python <type>".

    Raises
    ------
    TypeError
        If the leaf cannot be written.
    """
    for number in _PYTHON:
        if isinstance(leaf, number):
            return f"Python {number.__name__}"
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        raise TypeError(f"expected an array or a number, got {type(leaf).__name__}")
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return str(dtype)
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(f"expected an array of a numeric or boolean dtype, got {dtype}")
    return np.dtype(dtype).name


def is_kind(kind: str) -> bool:
    """Return whether `kind_of` may have returned this text."""
    if is_number(kind):
        return kind.removeprefix("Python ") in {number.__name__ for number in _PYTHON}
    if _is_key(kind):
        return True
    try:
        dtype = np.dtype(kind)
    except (TypeError, ValueError):
        return False
    numeric = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    return bool(numeric) and dtype.name == kind


def is_number(kind: str) -> bool:
    """Return whether a leaf of this kind is a Python number."""
    return kind.startswith("Python ")


def _is_key(kind: str) -> bool:
    return kind.startswith("key<")


def dtype_of(kind: str) -> np.dtype[Any]:
    """Return the dtype that represents a leaf in a file."""
    return np.dtype(np.uint32 if _is_key(kind) else kind)


def local_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of the array that represents a leaf in a file."""
    if is_number(kind_of(leaf)):
        return ()
    if _is_key(kind_of(leaf)):
        return tuple(jax.eval_shape(jax.random.key_data, leaf).shape)
    return tuple(leaf.shape)


def to_host(leaf: Any) -> NDArray[Any]:
    """Return an array or random keys as a contiguous array in this machine's byte order."""
    kind = kind_of(leaf)
    numbers = np.asarray(jax.random.key_data(leaf) if _is_key(kind) else leaf)
    return np.ascontiguousarray(numbers, dtype_of(kind)).reshape(numbers.shape)


def text_of(leaf: Any) -> str:
    """Return a Python number as text, which `parse` reads."""
    return next(repr(number(leaf)) for number in _PYTHON if isinstance(leaf, number))


def parse(kind: str, text: str) -> Any:
    """Return a Python number, given its text."""
    return next(f(text) for number, f in _PYTHON.items() if kind == f"Python {number.__name__}")


def to_leaf(numbers: NDArray[Any], like: Any) -> Any:
    """Return a leaf of the type of `like` with these values."""
    if _is_key(kind_of(like)):
        return jax.random.wrap_key_data(jnp.array(numbers), impl=jax.random.key_impl(like))
    if isinstance(like, np.ndarray | np.generic):
        return numbers[()] if isinstance(like, np.generic) else numbers
    if getattr(like, "weak_type", False) and numbers.ndim == 0:
        return jnp.asarray(
            numbers.item()
        )  # weakly typed as before, so that no program is compiled again
    return jnp.array(numbers)
