"""Gradients beside central differences through the float32 interface, as Mosaic checks them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import beam, bell, flawed_target, noise, slab, two_bells

__all__ = ["check", "gradients"]

STEPS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)


def check(
    caller: Any, request: dict[str, Any], name: str, output: str, count: int
) -> tuple[float, float, float]:
    """Compare the gradient of output² with differences in `count` random directions.

    Returns
    -------
    The step with the smallest median error, that error, and 1 - cosine at this step.
    """
    given = np.asarray(request[name])
    scale = float(np.sqrt(np.mean(given.astype(float) ** 2)))
    value = float(caller.apply(request)[output])
    found = caller.vector_jacobian_product(request, {name}, {output}, {output: 2 * value})[name]
    keys = jax.random.split(jax.random.PRNGKey(0), count)
    directions = [np.asarray(jax.random.normal(k, given.shape, jnp.float32)) for k in keys]
    directions = [v / np.linalg.norm(v) for v in directions]
    slopes = np.array([np.dot(found.astype(float), v) for v in directions])
    rows = []
    for step in STEPS:
        h = step * scale
        ends = [
            [float(caller.apply({**request, name: given + np.float32(s * h) * v})[output]) ** 2
             for s in (1, -1)]
            for v in directions
        ]  # fmt: skip
        differences = np.array([(a - b) / (2 * h) for a, b in ends])
        errors = np.abs(differences - slopes) / np.maximum(np.abs(differences), np.abs(slopes))
        size = np.linalg.norm(differences) * np.linalg.norm(slopes)
        rows.append((step, float(np.median(errors)), 1 - float(differences @ slopes / size)))
    return min(rows, key=lambda row: row[1])


def with_target(entry: Any, nx: int, width: float) -> dict[str, Any]:
    """Return a request for the source: two bells have made the target, and a bell is the guess."""
    request = slab(nx, source=bell(nx, width=width))
    flux = float(request["boundary_conditions"]["neumann"]["values"][0, 0]) / nx**2
    target = flawed_target(entry.problem(request), request["rho"], two_bells(nx), flux)
    return request | {"target_temperature": target}


def gradients(callers: Any, entries: Any, say: Any) -> float:
    """Check all gradient experiments, and return the largest 1 - cosine."""
    heat, elastic = callers["heat"], callers["elastic"]
    cases = {"thermal fd_check": (heat, slab(8, noise(32)), "rho", "thermal_compliance", 6)}
    for rho in (0.1, 0.2, 0.4, 0.6, 0.8):
        case = (heat, slab(8, rho), "rho", "thermal_compliance", 6)
        cases[f"thermal param_sweep {rho}"] = case
    request = with_target(entries["heat"], 8, 0.2)
    cases["thermal source_fd_check"] = (heat, request, "source", "identification_error", 6)
    for width in (0.05, 0.1, 0.2, 0.3, 0.5):
        case = (heat, with_target(entries["heat"], 16, width), "source", "identification_error", 4)
        cases[f"thermal source_width_sweep {width}"] = case
    bent = beam((8, 2, 4), noise(64), corner=True)
    cases["structural fd_check"] = (elastic, bent, "rho", "compliance", 6)
    worst = 0.0
    for name, case in cases.items():
        step, error, angle = check(*case)
        worst = max(worst, angle)
        say(f"{name}: median error {error:.1e}, 1 - cosine {angle:.1e} at step {step:g}")
    return worst
