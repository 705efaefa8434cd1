"""Patients' parameters as coordinates: a change of variables, with its volume."""

from __future__ import annotations

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from mpigrad.problems.population import Shared, Unknowns, centred, from_centred, to_centred


def test_the_density_of_patients_parameters():
    generator = np.random.default_rng(0)
    shared = Shared(
        jnp.asarray(generator.normal(size=5)), jnp.asarray(generator.normal(size=5)), jnp.zeros(())
    )
    unknowns = Unknowns(shared, jnp.asarray(generator.normal(size=(2, 5))))
    parameters = to_centred(unknowns)
    for a, b in zip(
        jax.tree.leaves(from_centred(parameters)), jax.tree.leaves(unknowns), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12)

    flat, unravel = jax.flatten_util.ravel_pytree(parameters)
    back = lambda x: jax.flatten_util.ravel_pytree(from_centred(unravel(x)))[0]
    _, volume = np.linalg.slogdet(jax.jit(jax.jacfwd(back))(flat))
    density = lambda u: -jnp.sum(u.effects**2) - jnp.sum(u.shared.typical**4)
    expected = density(unknowns) + volume
    np.testing.assert_allclose(centred(density)(parameters), expected, rtol=1e-12)
