"""Source time functions."""

from __future__ import annotations

import math

import numpy as np

from mpigrad._shapes import Float

__all__ = ["low_pass_gain", "ricker"]


def ricker(
    frequency: float, steps: int, dt: float, peak_time: float | None = None
) -> Float[np.ndarray, " steps"]:
    """Ricker's wavelet (1 - 2 a) exp(-a), a = (pi f (t - t0))^2, at t = 0, dt, 2 dt, ...

    Parameters
    ----------
    frequency
        Of the spectrum's peak, in Hz; the spectrum is below a hundredth of it beyond about
        2.7 times that.
    steps
        Number of samples.
    dt
        Between samples, in s.
    peak_time
        t0, in s; 1.5 / frequency if not given, where the wavelet starts at 1e-8 of its peak.
    """
    if not (frequency > 0 and math.isfinite(frequency) and dt > 0):
        raise ValueError(f"ricker: frequency {frequency} Hz and dt {dt} s must be positive")
    t = np.arange(steps) * dt - (1.5 / frequency if peak_time is None else peak_time)
    a = (math.pi * frequency * t) ** 2
    return (1 - 2 * a) * np.exp(-a)


def low_pass_gain(
    corner: float, samples: int, dt: float, order: int = 4
) -> Float[np.ndarray, " frequencies"]:
    """Gain of a zero-phase Butterworth low pass at the frequencies of `rfft` of `samples` samples.

    The squared magnitude of the filter of that order, 1 / (1 + (f / corner)^(2 order)): what
    filtering forwards and backwards in time amounts to. The corner, in Hz, is where it is 1/2.
    """
    frequencies = np.fft.rfftfreq(samples, dt)
    return 1 / (1 + (frequencies / corner) ** (2 * order))
