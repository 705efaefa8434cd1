"""Standard linear solids for a constant Q: errors over the band, causality, derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad.waves import fit_relaxation

pytestmark = pytest.mark.ranks(1)


@pytest.mark.parametrize(("mechanisms", "error"), [(1, 0.34), (2, 0.04), (3, 0.005)])
def test_q_is_constant_over_the_band(mechanisms, error):
    relaxation = fit_relaxation(50.0, (5.0, 50.0), mechanisms)
    assert relaxation.error(50.0) < error
    # The same mechanisms for other Q: the error grows by the curvature of 1/Q in the strength.
    for q in (10.0, 25.0, 200.0, 1e6):
        assert relaxation.error(q) < error + 1 / q + 0.02
    frequencies = np.geomspace(5, 50, 7)
    inverse = relaxation.inverse_q(frequencies, 50.0)
    np.testing.assert_allclose(50 * inverse, 1, atol=error)
    assert (
        relaxation.inverse_q(0.01, 50.0) < 0.1 / 50 and relaxation.inverse_q(1e4, 50.0) < 0.1 / 50
    )


def test_velocities():
    """Velocities rise as those of a constant Q do: c(f) = c (1 + ln(f / f0) / (pi Q))."""
    relaxation, f = fit_relaxation(60.0, (4.0, 60.0)), np.array([8.0, 15.0, 30.0])
    speed = relaxation.phase_velocity(f, 60.0, 2000.0, reference=15.0)
    np.testing.assert_allclose(speed[1], 2000, rtol=1e-14)
    expected = 2000 * (1 + np.log(f / 15) / (np.pi * 60))
    np.testing.assert_allclose(speed, expected, rtol=2e-4)
    v = relaxation.complex_velocity(f, 60.0, 2000.0, reference=15.0)
    np.testing.assert_allclose((v**2).imag / (v**2).real, relaxation.inverse_q(f, 60.0))


def test_the_strength_is_differentiable():
    relaxation, q = fit_relaxation(40.0, (5.0, 50.0)), jnp.array([20.0, 90.0, jnp.inf])
    assert relaxation.strength(q)[2] == 0
    slope = jax.jacfwd(relaxation.strength)(q).diagonal()
    step = 1e-4
    expected = (relaxation.strength(q + step) - relaxation.strength(q - step)) / (2 * step)
    np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-15)
    assert relaxation.strength(1.01 * relaxation.smallest_q) > 0


def test_bad_input():
    for q in (np.nan, -3.0, 0.0, 1.0, np.inf):
        with pytest.raises(ValueError, match="expected a finite q larger than 1, got"):
            fit_relaxation(q, (5.0, 50.0))
    for band in ((0.0, 5.0), (5.0, 5.0), (9.0, 5.0), (1.0, np.nan)):
        with pytest.raises(ValueError, match="expected a band"):
            fit_relaxation(50.0, band)
    with pytest.raises(ValueError, match="mechanisms must be 1, 2 or 3, got 4"):
        fit_relaxation(50.0, (5.0, 50.0), 4)
