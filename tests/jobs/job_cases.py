"""Jobs for tests, and the same without messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

N = 7


def records(ragged: bool = False) -> list[Any]:
    """Series of observations, of two lengths if ragged."""
    generator = np.random.default_rng(3)
    lengths = [6 if ragged and i % 3 == 1 else 4 for i in range(N)]
    return [
        {"t": np.sort(generator.uniform(0, 2, n)), "y": generator.standard_normal(n)}
        for n in lengths
    ]


def arguments() -> tuple[Any, Any]:
    """Shared ones, and those of each job."""
    generator = np.random.default_rng(4)
    shared = {"rate": jnp.asarray([0.7, 0.2]), "scale": jnp.asarray(1.3)}
    return shared, jnp.asarray(generator.standard_normal((N, 2)))


def curve(shared: Any, mine: Any, record: Any) -> Any:
    """Nonlinear in all, as long as the record."""
    rate = jnp.exp(shared["rate"][0] + 0.3 * mine[0])
    return shared["scale"] * jnp.exp(-rate * record["t"]) + shared["rate"][1] * jnp.sin(mine[1])


def misfit(shared: Any, mine: Any, record: Any) -> Any:
    """One number."""
    r = curve(shared, mine, record) - record["y"]
    return jnp.sum(r**2) + 0.1 * jnp.sum(mine**2)


def moments(shared: Any, mine: Any, record: Any) -> Any:
    """Several results, of the same shape for all records, and a whole number."""
    r = curve(shared, mine, record) - record["y"]
    return {"m": jnp.stack([jnp.sum(r), jnp.sum(r**2), jnp.sum(r**3)]), "n": r.size}


def serial_map(fn: Callable[..., Any], every: list[Any]) -> Callable[..., Any]:
    """All results, one job after the other."""
    return lambda shared, per_job: [
        jax.tree.map(jnp.asarray, fn(shared, per_job[i], r)) for i, r in enumerate(every)
    ]


def serial_sum(fn: Callable[..., Any], every: list[Any]) -> Callable[..., Any]:
    """Their sum."""
    all_of_them = serial_map(fn, every)
    return lambda *args: jax.tree.map(lambda *ys: sum(ys), *all_of_them(*args))


def equal_bits(a: Any, b: Any) -> None:
    """The same in every bit (but the sign of zeros)."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
