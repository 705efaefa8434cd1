"""Results of traced functions that are seen to be zero."""

import jax
import jax.numpy as jnp
import pytest

from mpigrad.fem.tracing import are_zero


def energy(u, g, k):
    return k * (0.5 * g @ g) - jnp.log(1 + jnp.tanh(g[0]) ** 2)


@pytest.mark.ranks(1)
def test_zeros_in_derivatives_are_found():
    """They are those of a function that does not depend on u."""
    u, g, k = 1.0, jnp.ones(2), 3.0
    in_u, in_g = jax.grad(energy, argnums=0), jax.grad(energy, argnums=1)
    functions = [
        (in_u, True),
        (in_g, False),
        (jax.jacfwd(in_u, argnums=0), True),
        (jax.jacfwd(in_u, argnums=1), True),
        (jax.jacfwd(in_g, argnums=0), True),
        (jax.jacfwd(in_g, argnums=1), False),
        (lambda u, g, k: 0.0 * g + jnp.zeros(2), True),
        (lambda u, g, k: jax.jit(lambda x, y: (x - x * 0.0) * y)(0.0, g), True),
        (lambda u, g, k: jnp.where(u > 0, 0.0, g), False),
        (lambda u, g, k: jnp.where(u > 0, g, 0.0), False),
        (lambda u, g, k: jnp.where(u > 0, 0.0, 0.0 * g), True),
        (lambda u, g, k: jnp.exp(0.0 * g), False),
        (lambda u, g, k: jnp.array([0.0, 1.0]), False),
    ]
    for function, expected in functions:
        assert are_zero(jax.make_jaxpr(function)(u, g, k)) == [expected]


@pytest.mark.ranks(1)
def test_traced_constants_are_not_zero():
    def f(x):
        closed = jax.make_jaxpr(lambda y: (x * y, 0.0 * y))(1.0)
        assert are_zero(closed) == [False, True]
        return x

    jax.jit(f)(0.0)
