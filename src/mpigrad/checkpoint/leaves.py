"""The leaves of a tree as arrays of plain numbers, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

__all__ = ["dtype_of", "is_number", "kind_of", "local_shape", "parse", "restored", "to_host"]

# Numbers of Python are kept as text, of any length and to the last bit.
_PYTHON = {"bool": lambda text: text == "True", "int": int, "float": float, "complex": complex}


def kind_of(leaf: Any) -> str:
    """What a leaf is made of: a dtype, "key<...>" for JAX's random keys, or a type of Python.

    Raises
    ------
    TypeError
        The leaf cannot be written.
    """
    if type(leaf).__name__ in _PYTHON and isinstance(leaf, bool | int | float | complex):
        return f"Python {type(leaf).__name__}"
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        raise TypeError(f"a {type(leaf).__name__} is neither an array nor a number")
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return str(dtype)
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(f"arrays of {dtype} are not written: numbers and truth values are")
    return np.dtype(dtype).name


def is_number(kind: str) -> bool:
    """Whether a leaf of this kind is a number of Python."""
    return kind.startswith("Python ")


def _is_key(kind: str) -> bool:
    return kind.startswith("key<")


def dtype_of(kind: str) -> np.dtype[Any]:
    """The dtype of the numbers that stand for a leaf in a file."""
    return np.dtype(np.uint32 if _is_key(kind) else kind)


def local_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of the array of numbers that stands for a leaf."""
    if is_number(kind_of(leaf)):
        return ()
    if _is_key(kind_of(leaf)):
        return tuple(jax.eval_shape(jax.random.key_data, leaf).shape)
    return tuple(leaf.shape)


def to_host(leaf: Any) -> NDArray[Any]:
    """The numbers of an array or of random keys: contiguous, in this machine's byte order."""
    kind = kind_of(leaf)
    numbers = np.asarray(jax.random.key_data(leaf) if _is_key(kind) else leaf)
    return np.ascontiguousarray(numbers, dtype_of(kind)).reshape(numbers.shape)


def parse(kind: str, text: str) -> Any:
    """A number of Python from its `repr`."""
    return _PYTHON[kind.removeprefix("Python ")](text)


def restored(numbers: NDArray[Any], like: Any) -> Any:
    """A leaf of the type of `like` that holds these numbers."""
    if _is_key(kind_of(like)):
        return jax.random.wrap_key_data(jnp.array(numbers), impl=jax.random.key_impl(like))
    if isinstance(like, np.ndarray | np.generic):
        return numbers[()] if isinstance(like, np.generic) else numbers
    if getattr(like, "weak_type", False) and numbers.ndim == 0:
        return jnp.asarray(numbers.item())  # weak again, as programs were compiled for it
    return jnp.array(numbers)
