"""Source time functions."""

from __future__ import annotations

import math
import warnings

import numpy as np

from mpigrad._shapes import Float

__all__ = ["low_pass_gain", "ricker"]


def ricker(
    frequency: float, steps: int, dt: float, peak_time: float | None = None
) -> Float[np.ndarray, " steps"]:
    """Return a Ricker wavelet sampled at t = 0, dt, 2 dt, ...

    The wavelet is (1 - 2 a) exp(-a) with a = (pi f (t - t0))^2.

    Parameters
    ----------
    frequency
        Frequency f of the peak of the spectrum, in Hz. Beyond about 2.7 f the spectrum is below a
        hundredth of the peak.
    steps
        Number of samples.
    dt
        Time between samples, in s.
    peak_time
        t0 in s. Default: 1.5 / frequency, for which the wavelet starts at 1e-8 of its peak.

    Raises
    ------
    ValueError
        If `frequency` or `dt` is not positive.

    Warns
    -----
    UserWarning
        If `frequency` is above the Nyquist frequency 1 / (2 dt). One of their units may be wrong.

    Examples
    --------
    >>> from mpigrad.waves import ricker
    >>> wavelet = ricker(15.0, steps=150, dt=2e-3)
    >>> wavelet.shape, int(wavelet.argmax())
    ((150,), 50)
    """
    if not (frequency > 0 and math.isfinite(frequency) and dt > 0):
        raise ValueError(
            f"ricker: frequency and dt must be positive, got {frequency} Hz and {dt} s. Give a "
            "positive peak frequency and time step."
        )
    if 2 * dt * frequency > 1:
        warnings.warn(
            f"ricker: a frequency of {frequency:.4g} Hz cannot be sampled every {dt:.4g} s, which "
            f"allows at most {0.5 / dt:.4g} Hz. Give the frequency in Hz and dt in s.",
            stacklevel=2,
        )
    t = np.arange(steps) * dt - (1.5 / frequency if peak_time is None else peak_time)
    a = (math.pi * frequency * t) ** 2
    return (1 - 2 * a) * np.exp(-a)


def low_pass_gain(
    corner: float, samples: int, dt: float, order: int = 4
) -> Float[np.ndarray, " frequencies"]:
    """Return the gain of a zero-phase Butterworth low pass at the frequencies of `np.fft.rfftfreq`.

    Filtering forwards and backwards in time multiplies the spectrum by the squared magnitude of the
    filter, 1 / (1 + (f / corner)^(2 order)). It is 1/2 at the corner frequency, in Hz.
    """
    frequencies = np.fft.rfftfreq(samples, dt)
    return 1 / (1 + (frequencies / corner) ** (2 * order))
