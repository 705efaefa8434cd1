"""Two compartments: against the matrix exponential, and derivatives of every order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm

from mpigrad_apps.population import Kinetics, by_forward_mode, decay_rate

PARAMETERS = np.array([1.2, 4.0, 35.0, 8.0, 60.0])
DOSE_TIMES, DOSES = np.array([0.0, 12.0, 24.0]), np.array([100.0, 50.0, 50.0])
TIMES = np.array([0.3, 2.0, 7.5, 12.0, 13.0, 30.0, 48.0])


def rates(parameters):
    ka, cl, v1, q, v2 = parameters
    return np.array([[-ka, 0, 0], [ka, -(cl + q) / v1, q / v2], [0, q / v1, -q / v2]])


def exact(parameters, dose_times, doses, times):
    """The equations are linear: every dose by itself, by the matrix exponential."""
    v1, matrix = parameters[2], rates(parameters)
    amounts = np.zeros(len(times))
    for start, dose in zip(dose_times, doses, strict=True):
        for i, time in enumerate(times):
            if time > start:
                amounts[i] += dose * expm((time - start) * matrix)[1, 0]
    return amounts / v1


STIFF = pytest.param(True, marks=pytest.mark.full("the implicit method takes long to compile"))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stiff", [False, STIFF])
def test_concentrations_are_those_of_the_matrix_exponential(stiff):
    found = jax.jit(Kinetics(stiff, rtol=1e-8).concentrations)
    parameters = PARAMETERS * (np.array([200.0, 1, 1, 50, 1]) if stiff else 1)
    seen = found(jnp.log(parameters), DOSE_TIMES, DOSES, TIMES)
    np.testing.assert_allclose(seen, exact(parameters, DOSE_TIMES, DOSES, TIMES), rtol=1e-6)
    # Doses at the same time are one; one that has not been given yet is not seen.
    # Those of 0 are none.
    together, late = np.array([0.0, 0.0, 0.0]), np.array([0.0, 0.0, 100.0])
    for when, amounts in ((together, DOSES), (late, np.array([200.0, 0.0, 50.0]))):
        seen = found(jnp.log(parameters), when, amounts, TIMES)
        once = exact(parameters, [0.0], [200.0], TIMES)
        np.testing.assert_allclose(seen, once, rtol=1e-6)


@pytest.mark.ranks(1)
def test_the_decay_rate_is_an_eigenvalue():
    eigenvalues = np.linalg.eigvals(rates(PARAMETERS)[1:, 1:])
    np.testing.assert_allclose(decay_rate(PARAMETERS), -eigenvalues.min(), rtol=1e-12)


@pytest.mark.ranks(1)
def test_derivatives_of_the_concentrations():
    """Both modes agree; the slope is that of the exact solution."""
    model = Kinetics(rtol=1e-9)
    x, direction = jnp.log(PARAMETERS), jnp.array([0.3, -0.2, 0.5, 0.4, -0.1])

    def total(x):
        return jnp.sum(jnp.log(model.concentrations(x, DOSE_TIMES, DOSES, TIMES)))

    @jax.jit
    def derivatives(x):
        gradient, bent = jax.jvp(jax.grad(total), (x,), (direction,))
        return gradient, jax.jvp(total, (x,), (direction,))[1], bent

    gradient, slope, bent = derivatives(x)
    np.testing.assert_allclose(gradient @ direction, slope, rtol=1e-12)

    def reference(s):
        return np.sum(np.log(exact(np.exp(x + s * direction), DOSE_TIMES, DOSES, TIMES)))

    h = 1e-3
    ahead, here, behind = reference(h), reference(0.0), reference(-h)
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * h), rtol=1e-5)
    np.testing.assert_allclose(bent @ direction, (ahead - 2 * here + behind) / h**2, rtol=1e-4)


@pytest.mark.ranks(1)
def test_a_failed_integration_gives_nan():
    found = Kinetics(max_steps=3).concentrations(jnp.log(PARAMETERS), DOSE_TIMES, DOSES, TIMES)
    assert np.all(np.isnan(found))


@pytest.mark.ranks(1)
def test_derivatives_by_forward_mode():
    """As those of the function itself, to the third order; in its data they are refused."""

    def f(x, shift):
        return jnp.sin(x[0] * x[1] + shift) * jnp.arange(1.0, 4.0) + x**2 @ x

    x, shift = jnp.array([0.3, 0.7]), jnp.asarray(0.2)
    g = by_forward_mode(f)
    for derivative in (
        jax.jacrev,
        jax.jacfwd,
        lambda h: jax.jacfwd(jax.jacrev(h)),
        lambda h: jax.jacrev(jax.jacrev(jax.jacfwd(h))),
    ):
        found, expected = jax.jit(lambda *args, d=derivative: (d(g)(*args), d(f)(*args)))(x, shift)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    with pytest.raises(TypeError, match="another operand varies, too"):
        jax.grad(lambda shift: jnp.sum(g(x, shift)))(shift)
