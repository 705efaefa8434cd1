"""Find the density of a slab from temperatures, beside the published traces of Mosaic.

The data are flawed (`cases.flawed_target`), so the true density does not have the smallest error.
Rounding in float32 decides the last digits, so the order of solvers has no meaning.
"""

from __future__ import annotations

import csv
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import flawed_target, slab, two_bells

import mpigrad as mg

__all__ = ["inversion", "invert"]


def invert(entry: Any, nx: int, depth: float, steps: int) -> list[float]:
    """Return the error before each step of L-BFGS, in float32.

    Parameters
    ----------
    depth
        The thickness of the slab. The published run has 1, later versions have 2 / nx.
    """
    import optax

    request = slab(nx)
    request["hex_mesh"]["points"][:, 2] *= np.float32(depth * nx / 2)
    request["boundary_conditions"]["neumann"]["values"][:] = 1 / depth
    problem = entry.problem(request)
    truth = np.clip(two_bells(nx), 0, 1)
    target = flawed_target(problem, truth, 0 * truth, 1 / depth * (1 / (nx // 2)) * depth / 4)
    rows = jnp.asarray(problem.mesh.cell_ids)
    _, (_, source, _, counted) = entry.arguments(request)
    data = jnp.asarray(target[problem.mesh.vertex_ids], float)

    def share(rho: jax.Array) -> jax.Array:
        return problem.shares(rho[rows].astype(float), source, data, counted)[1]

    both = mg.value_and_grad(share, replicated=0, comm=problem.mesh.comm)

    @jax.custom_vjp
    def error(rho: jax.Array) -> jax.Array:
        return both(rho)[0].astype(jnp.float32)

    def forward(rho: jax.Array) -> Any:
        value, gradient = both(rho)
        return value.astype(jnp.float32), gradient.astype(jnp.float32)

    error.defvjp(forward, lambda gradient, cotangent: (gradient * cotangent,))
    method = optax.lbfgs()

    @jax.jit
    def step(rho: jax.Array, state: Any) -> Any:
        value, gradient = jax.value_and_grad(error)(rho)
        moves, state = method.update(
            gradient, state, rho, value=value, grad=gradient, value_fn=error
        )
        return jnp.clip(rho + moves, 1e-3, 1.0).astype(jnp.float32), state, value

    rho = jnp.asarray(request["rho"])
    state = method.init(rho)
    errors = []
    for _ in range(steps):
        rho, state, value = step(rho, state)
        errors.append(float(value))
    return errors


def inversion(entries: Any, data: pathlib.Path, say: Any, steps: int) -> float:
    """Print the trace beside the published ones, and return the last error by the first."""
    with (data / "published_conductivity_recovery.csv").open() as file:
        published = list(csv.DictReader(file))
    names = [name for name in published[0] if name != "iteration"]
    errors = invert(entries["heat"], 16, 1.0, steps)
    say("thermal conductivity_recovery_bfgs: identification error")
    say(f"{'step':>6} {'mpigrad':>12} " + " ".join(f"{name:>12}" for name in names))
    for i in sorted({0, 1, 2, 5, 10, 20, 50, 100, 150, len(errors) - 1} & set(range(len(errors)))):
        row = " ".join(f"{float(published[i][name]):12.6g}" for name in names)
        say(f"{i:>6} {errors[i]:12.6g} {row}")
    return errors[-1] / errors[0]
