"""Objectives and unknowns in other units: the same iterates, or an error that names the scale."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpigrad.optimize import LBFGS, LBFGSB, GaussNewton, NewtonCG, NonlinearCG, Optax, minimize

HOW = {"loss": "replicated", "replicated": True, "max_steps": 30}


def start(dtype="float64"):
    return jnp.asarray([0.5, 0.2, -0.3, 0.4], dtype)


def valley(x):
    return jnp.sum((x[1:] - x[:-1] ** 2) ** 2) + jnp.sum((1 - x) ** 2)


@pytest.mark.parametrize("method", [LBFGS(), NewtonCG()])
def test_iterates_do_not_depend_on_the_unit_of_the_objective(method, comm):
    expected = minimize(valley, start(), method, comm=comm, **HOW).value
    for power in (-300, -40, 300):
        found = minimize(lambda x: valley(x) * 2.0**power, start(), method, comm=comm, **HOW)  # noqa: B023
        np.testing.assert_array_equal(found.value, expected)


@pytest.mark.parametrize("method", [LBFGS(), LBFGSB(), NonlinearCG()])
def test_a_first_step_that_rounding_would_hide(method, comm):
    """One is nothing beside a modulus of 10^11 in float32."""
    unit = jnp.float32(2.0**37)
    found = minimize(
        lambda x: valley(x / unit), start("float32") * unit, method, comm=comm, **HOW
    ).value
    np.testing.assert_allclose(found / unit, 1.0, rtol=1e-3)


@pytest.mark.parametrize("method", [LBFGS(), NewtonCG(), Optax(optax.adam(0.1))])
@pytest.mark.parametrize("power", [-600, 600])
def test_squares_of_the_gradient_that_vanish_or_overflow(method, power, comm):
    with pytest.raises(ValueError, match=r"largest entry of the gradient .* Multiply f|Divide f"):
        minimize(lambda x: valley(x) * 2.0**power, start(), method, comm=comm, **HOW)


def test_squares_that_overflow_in_a_transformation_of_optax(comm):
    method, unit = Optax(optax.adam(0.1)), jnp.float32(1e30)
    with pytest.raises(ValueError, match=r"the step is zero.*Divide f by a number near .*e\+30"):
        minimize(lambda x: valley(x) * unit, start("float32"), method, comm=comm, **HOW)


def test_a_start_that_has_converged_may_have_any_scale(comm):
    found = minimize(lambda x: jnp.sum(x**4), jnp.full(2, 1e-60), atol=1e-8, comm=comm, **HOW)
    assert found.stats["num_steps"] == 0


@pytest.mark.parametrize("power", [-100, 100])
def test_squares_of_residuals_that_vanish_or_overflow(power, comm):
    def residuals(x):
        return (x - 1) * jnp.float32(2.0**power)

    with pytest.raises(ValueError, match=r"at x0 the largest residual is .* Multiply them"):
        minimize(residuals, start("float32"), GaussNewton(), comm=comm, **HOW)
    exact = jnp.ones(4, "float32")
    assert minimize(residuals, exact, GaussNewton(), comm=comm, **HOW).stats["loss"] == 0
