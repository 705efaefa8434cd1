"""True diffusivities and sources of the Poisson problem."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = [
    "SOURCES",
    "TRUTHS",
    "manufactured_solution",
    "manufactured_source",
]

Field = Callable[[jax.Array, jax.Array], jax.Array]


def quadratic(x: Float[Array, "*n"], y: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return kappa = 1 + x^2 + y^2, the case of the ADCME paper."""
    return 1 + x**2 + y**2


def hills(x: Float[Array, "*n"], y: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return a smooth kappa between about 0.5 and 2.5: 1 with a hill and a hollow."""
    hill = 1.5 * jnp.exp(-((x - 0.3) ** 2 + (y - 0.35) ** 2) / 0.03)
    hollow = 0.5 * jnp.exp(-((x - 0.7) ** 2 + (y - 0.65) ** 2) / 0.03)
    return 1 + hill - hollow


def manufactured_solution(x: Float[Array, "*n"], y: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return u = x (1 - x) y (1 - y), which is zero on the boundary of the unit square."""
    return x * (1 - x) * y * (1 - y)


def manufactured_source(kappa: Field) -> Field:
    """Return the source f = div(kappa grad u) whose solution is `manufactured_solution`."""

    def source(x: Float[Array, ""], y: Float[Array, ""]) -> Float[Array, ""]:
        def flux(axis: int) -> Field:
            slope = jax.grad(manufactured_solution, argnums=axis)
            return lambda x, y: kappa(x, y) * slope(x, y)

        return jax.grad(flux(0), argnums=0)(x, y) + jax.grad(flux(1), argnums=1)(x, y)

    return jax.jit(jnp.vectorize(source))


TRUTHS: dict[str, Field] = {"quadratic": quadratic, "hills": hills}
SOURCES: dict[str, Callable[[Field], Field]] = {
    "manufactured": manufactured_source,
    "one": lambda kappa: lambda x, y: jnp.ones_like(x),
}
