"""Jobs for tests, and the same maps without messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

N = 7


def items(ragged: bool = False) -> list[Any]:
    """Series of observations, of two lengths if ragged."""
    generator = np.random.default_rng(3)
    lengths = [6 if ragged and i % 3 == 1 else 4 for i in range(N)]
    return [
        {"t": np.sort(generator.uniform(0, 2, n)), "y": generator.standard_normal(n)}
        for n in lengths
    ]


def arguments() -> tuple[Any, Any]:
    """Parameters of all jobs, and of each job."""
    generator = np.random.default_rng(4)
    params = {"rate": jnp.asarray([0.7, 0.2]), "scale": jnp.asarray(1.3)}
    return params, jnp.asarray(generator.standard_normal((N, 2)))


def curve(params: Any, item_params: Any, item: Any) -> Any:
    """A curve as long as the item, nonlinear in all arguments."""
    rate = jnp.exp(params["rate"][0] + 0.3 * item_params[0])
    return params["scale"] * jnp.exp(-rate * item["t"]) + params["rate"][1] * jnp.sin(
        item_params[1]
    )


def misfit(params: Any, item_params: Any, item: Any) -> Any:
    """One number."""
    r = curve(params, item_params, item) - item["y"]
    return jnp.sum(r**2) + 0.1 * jnp.sum(item_params**2)


def moments(params: Any, item_params: Any, item: Any) -> Any:
    """Several results, of the same shape for all items, and a whole number."""
    r = curve(params, item_params, item) - item["y"]
    return {"m": jnp.stack([jnp.sum(r), jnp.sum(r**2), jnp.sum(r**3)]), "n": r.size}


def serial_map(fn: Callable[..., Any], every: list[Any]) -> Callable[..., Any]:
    """The map without a pool: one job after the other."""
    return lambda params, item_params: [
        jax.tree.map(jnp.asarray, fn(params, item_params[i], r)) for i, r in enumerate(every)
    ]


def serial_sum(fn: Callable[..., Any], every: list[Any]) -> Callable[..., Any]:
    """The sum of the results without a pool."""
    all_of_them = serial_map(fn, every)
    return lambda *args: jax.tree.map(lambda *ys: sum(ys), *all_of_them(*args))


def equal_bits(a: Any, b: Any) -> None:
    """Assert that two pytrees agree in every bit (except the sign of zeros)."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
