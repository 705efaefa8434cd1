"""Choices of entries, none among them: differentiated, and batched, like all others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import close
from mpigrad.operations.carrier import tie_in
from mpigrad.operations.local_programs import put, take

INDICES = [
    np.array([3, 0, 3]),
    np.zeros(0, np.int32),
    np.zeros((0, 2), np.int32),
    np.eye(2, dtype=int),
]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("index", INDICES, ids=lambda index: str(index.shape))
def test_entries(index: np.ndarray) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)))
    close(take(x, index), x[index])
    values = jnp.arange(1.0, 1 + index.size)
    close(put(4, index.ravel(), values), np.bincount(index.ravel(), values, 4))
    gradient = jax.grad(lambda x: jnp.sum(take(x, index) ** 2))(x)
    close(gradient, 2 * x * np.bincount(index.ravel(), minlength=4)[:, None])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", ["float64", "complex64", "int16", "bool"])
def test_none_are_batched(dtype: str) -> None:
    """In the eyes of JAX: with a batch axis wherever the source has one."""
    seen: list[Any] = []

    @jax.custom_batching.custom_vmap
    def message(x: Any) -> Any:
        return x

    @message.def_vmap
    def batched(size: int, flags: Any, x: Any) -> Any:
        seen.append((size, flags[0]))
        return x, True

    none = np.zeros(0, np.int32)
    xs = jnp.ones((2, 5)).astype(dtype)
    jax.vmap(lambda x: message(take(x, none)))(xs)
    jax.vmap(lambda x: message(put(3, none, x[:0])))(xs)
    jax.vmap(lambda x: message(tie_in(jnp.zeros(3, dtype), x)))(xs)
    jax.vmap(lambda x: message(tie_in(jnp.zeros(3, "int32"), x)))(xs)
    assert seen == [(2, True)] * 4
    constant = tie_in(jnp.ones(3, dtype), xs[0])
    assert constant.dtype == dtype
    close(constant, np.ones(3, dtype))
