"""Standard linear solids whose quality factor Q is constant over a band of frequencies.

The complex modulus of a medium with the relaxed (static) modulus M_R is

    M(w) = M_R (1 + t sum of b_l i w t_l / (1 + i w t_l))

with the relaxation times t_l, their weights b_l and the strength t. Times and weights are the same
everywhere, and t depends on Q. This is the tau method of Blanch, Robertsson and Symes ("Modeling of
a constant Q", Geophysics 60, 1995), here with one weight for each mechanism.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from mpigrad.extend import Complex, Float

__all__ = ["Relaxation", "fit_relaxation"]

_SAMPLES = 101  # frequencies of a band, at equal ratios
_DIGITS = 10  # so that all processors find the same numbers


@dataclasses.dataclass(frozen=True)
class Relaxation:
    """Relaxation times and weights of one to three standard linear solids.

    Make one with `fit_relaxation`.

    Attributes
    ----------
    band
        The lowest and the highest frequency of the fit, in Hz.
    times
        Relaxation times in s, one for each mechanism.
    weights
        Their weights. For large Q the strength is 1/Q.

    Examples
    --------
    >>> from mpigrad.waves import fit_relaxation
    >>> relaxation = fit_relaxation(50.0, (5.0, 50.0), mechanisms=3)
    >>> len(relaxation.times), relaxation.error(50.0) < 0.01
    (3, True)
    >>> bool(relaxation.strength(20.0) > relaxation.strength(100.0))
    True
    """

    band: tuple[float, float]
    times: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def smallest_q(self) -> float:
        """The lower limit of Q. At smaller values the strength is zero or negative."""
        a, b = self._spectra(self._frequencies)
        return float(np.mean(b) / np.mean(a))

    def strength(self, q: Any) -> Any:
        """Return the strength t for a quality factor, of the same shape and differentiable.

        1/Q(w) = t A(w) / (1 + t B(w)) with the sums A and B of the real and imaginary parts of the
        mechanisms. t solves t (A - B / Q) = 1 / Q by least squares over the band.

        Parameters
        ----------
        q
            A number, or an array of NumPy or JAX. Infinity means no loss.
        """
        a, b = self._spectra(self._frequencies)
        r = 1 / q
        linear = float(np.mean(a)) - float(np.mean(b)) * r
        square = float(np.mean(a * a)) - (2 * float(np.mean(a * b)) - float(np.mean(b * b)) * r) * r
        return r * linear / square

    def inverse_q(
        self, frequency: float | Float[np.ndarray, "*f"], q: float
    ) -> Float[np.ndarray, "*f"]:
        """Return 1/Q of waves of a frequency in Hz, in a medium of quality factor q.

        It is Im M / Re M.
        """
        m = self._modulus(frequency, q)
        return np.asarray(np.imag(m) / np.real(m))

    def complex_velocity(
        self,
        frequency: float | Float[np.ndarray, "*f"],
        q: float,
        velocity: float,
        reference: float | None = None,
    ) -> Complex[np.ndarray, "*f"]:
        """Return sqrt(M / density) in the unit of `velocity`.

        A plane wave is exp(i (w t - k x)) with k = w / v, so its amplitude falls by exp(Im k x).

        Parameters
        ----------
        frequency
            Frequencies in Hz.
        q
            Quality factor of the medium.
        velocity
            Phase velocity at the frequency `reference`.
        reference
            In Hz. Default: the geometric mean of the band.
        """
        at = self.reference if reference is None else reference
        return np.asarray(
            velocity * np.sqrt(self.relaxed_square(q, at) * self._modulus(frequency, q))
        )

    def phase_velocity(
        self,
        frequency: float | Float[np.ndarray, "*f"],
        q: float,
        velocity: float,
        reference: float | None = None,
    ) -> Float[np.ndarray, "*f"]:
        """Return the phase velocity 1 / Re(1 / v), with the arguments of `complex_velocity`."""
        return np.asarray(1 / np.real(1 / self.complex_velocity(frequency, q, velocity, reference)))

    def error(self, q: float) -> float:
        """Return the largest relative error of 1/Q over the band, for a quality factor q."""
        return float(np.max(np.abs(q * self.inverse_q(self._frequencies, q) - 1)))

    @property
    def reference(self) -> float:
        """The geometric mean of the band, in Hz."""
        return math.sqrt(self.band[0] * self.band[1])

    def relaxed_square(self, q: Any, frequency: float) -> Any:
        """Return M_R / density for a phase velocity of 1 at a frequency in Hz, differentiable."""
        a, b = (float(x) for x in self._spectra(np.float64(frequency)))
        t = self.strength(q)
        real, imaginary = 1 + t * b, t * a
        size = (real**2 + imaginary**2) ** 0.5
        return (size + real) / (2 * size**2)

    def unrelaxed_square(self, q: Any, frequency: float) -> Any:
        """Return M_U / density for a phase velocity of 1 at a frequency in Hz, differentiable.

        M_U is the modulus of infinite frequency, which limits the time step.
        """
        return self.relaxed_square(q, frequency) * (1 + self.strength(q) * sum(self.weights))

    @property
    def _frequencies(self) -> Float[np.ndarray, " f"]:
        return _samples(self.band)

    def _spectra(self, frequency: Any) -> tuple[np.ndarray, np.ndarray]:
        return _spectra(frequency, np.array(self.times), np.array(self.weights))

    def _modulus(self, frequency: Any, q: float) -> np.ndarray:
        a, b = self._spectra(frequency)
        return np.asarray(1 + self.strength(float(q)) * (b + 1j * a))


def fit_relaxation(q: float, band: tuple[float, float], mechanisms: int = 3) -> Relaxation:
    """Fit standard linear solids to a quality factor that is constant over a band.

    Times and weights minimize the squares of Q / Q(f) - 1 at frequencies of equal ratios. They are
    fitted for one Q, and serve for all: the strength of the mechanisms follows from the Q of a cell
    (`Relaxation.strength`). `Relaxation.error` gives the error over the band for any Q.

    Parameters
    ----------
    q
        A typical quality factor of the model.
    band
        The lowest and the highest frequency, in Hz.
    mechanisms
        Number of standard linear solids, 1 to 3.

    Raises
    ------
    ValueError
        If q is not larger than 1 and finite, the band is empty or not positive, or `mechanisms` is
        not 1, 2 or 3.

    Examples
    --------
    >>> import numpy as np
    >>> from mpigrad.waves import fit_relaxation
    >>> relaxation = fit_relaxation(50.0, (5.0, 50.0), mechanisms=2)
    >>> relaxation.error(50.0) < 0.04, relaxation.error(200.0) < 0.05
    (True, True)
    >>> slow, fast = relaxation.phase_velocity(np.array([5.0, 50.0]), 50.0, velocity=2000.0)
    >>> bool(slow < 2000.0 < fast)
    True
    """
    if not (q > 1 and math.isfinite(q)):
        raise ValueError(
            f"fit_relaxation: expected a finite q larger than 1, got {q}. Give a typical quality "
            "factor of the model."
        )
    low, high = (float(f) for f in band)
    if not (0 < low < high < math.inf):
        raise ValueError(
            f"fit_relaxation: expected a band (lowest, highest) with 0 < lowest < highest in Hz, "
            f"got {band!r}. Give the frequencies of the wavelet."
        )
    if mechanisms not in (1, 2, 3):
        raise ValueError(
            f"fit_relaxation: mechanisms must be 1, 2 or 3, got {mechanisms!r}. Use more of them "
            "for a wider band."
        )
    from scipy.optimize import least_squares  # here, because it takes long to import

    frequencies = _samples((low, high))

    def unpacked(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.exp(x[:mechanisms]), np.exp(x[mechanisms:])

    def residuals(x: np.ndarray) -> np.ndarray:
        a, b = _spectra(frequencies, *unpacked(x))
        return a / (1 + b / q) - 1  # t = 1/q

    middle = (np.arange(mechanisms) + 0.5) / mechanisms
    corners = low * (high / low) ** middle
    first = np.concatenate([-np.log(2 * np.pi * corners), np.zeros(mechanisms)])
    times, weights = unpacked(least_squares(residuals, first, xtol=1e-13, ftol=1e-13).x)
    a, _ = _spectra(frequencies, times, weights)
    weights = weights * np.mean(a) / np.mean(a * a)
    return Relaxation((low, high), *(tuple(map(_rounded, x)) for x in (times, weights)))


def _rounded(x: float) -> float:
    return float(f"{x:.{_DIGITS}g}")


def _samples(band: tuple[float, float]) -> np.ndarray:
    return np.geomspace(*band, _SAMPLES)


def _spectra(
    frequency: Any, times: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the imaginary and the real part of the sum of all mechanisms."""
    x = 2 * np.pi * np.asarray(frequency, float)[..., None] * times
    imaginary, real = weights * x / (1 + x**2), weights * x**2 / (1 + x**2)
    return np.asarray(imaginary.sum(-1)), np.asarray(real.sum(-1))
