"""JAX computes before mpigrad is imported."""

import jax.numpy as jnp

print(jnp.ones(2).sum())

import mpigrad  # noqa: E402, F401
