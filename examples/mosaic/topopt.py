"""Topology optimization of a beam by Adam, beside the published trace of Mosaic."""

from __future__ import annotations

import csv
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import beam

__all__ = ["optimize", "topopt"]


def optimize(caller: Any, shape: tuple[int, int, int], steps: int) -> list[tuple[float, float]]:
    """Return the compliance and the mean density before each step.

    The loss is the compliance + 50 (mean density - 1/2)².
    """
    import optax

    request = beam(shape, corner=True)
    method = optax.adam(0.05)
    rho = jnp.asarray(request["rho"])
    state = method.init(rho)

    @jax.jit
    def step(rho: jax.Array, state: Any, gradient: jax.Array) -> Any:
        gradient = gradient + 100 * (jnp.mean(rho) - 0.5) / rho.size
        moves, state = method.update(gradient.astype(jnp.float32), state)
        return jnp.clip(rho + moves, 1e-3, 1.0).astype(jnp.float32), state

    trace, best, since = [], np.inf, 0
    for _ in range(steps):
        request["rho"] = np.asarray(rho)
        value = float(caller.apply(request)["compliance"])
        gradient = caller.vector_jacobian_product(
            request, {"rho"}, {"compliance"}, {"compliance": 1.0}
        )
        volume = float(jnp.mean(rho))
        trace.append((value, volume))
        loss = value + 50 * (volume - 0.5) ** 2
        best, since = (loss, 0) if loss < best else (best, since + 1)
        if since == 100:  # as Mosaic stops
            break
        rho, state = step(rho, state, gradient["rho"])
    return trace


def topopt(callers: Any, data: pathlib.Path, say: Any, steps: int) -> float:
    """Print the trace beside the published one, and return the last ratio of compliances."""
    with (data / "published_topopt.csv").open() as file:
        published = [float(row["compliance JAX-FEM"]) for row in csv.DictReader(file)]
    trace = optimize(callers["elastic"], (16, 2, 8), steps)
    say(f"structural topopt:\n{'step':>6} {'mpigrad':>12} {'volume':>10} {'published':>12}")
    for i in sorted({0, 1, 10, 100, 500, 1000, len(trace) - 1} & set(range(len(trace)))):
        say(f"{i:>6} {trace[i][0]:12.6g} {trace[i][1]:10.6f} {published[i]:12.6g}")
    return trace[-1][0] / published[len(trace) - 1]
