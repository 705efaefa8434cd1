"""Source time functions."""

from __future__ import annotations

import math
import pathlib

import numpy as np
from jaxtyping import Float

from mpigrad.problems.waves.files import read_array

__all__ = ["low_pass_gain", "read_wavelets", "ricker"]


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


def read_wavelets(path: pathlib.Path, steps: int) -> Float[np.ndarray, "shots sources steps"]:
    """A user's own source time functions, sampled at the time steps (on one rank).

    Parameters
    ----------
    path
        File of an array (steps,), (n_shots, steps) or (n_shots, n_sources, steps), in a format
        that `read_array` knows. A longer array is cut off, a shorter one continued by zeros.

    Returns
    -------
    (n_shots | 1, n_sources, steps)

    Raises
    ------
    ValueError
        Where the file holds no such array, or a number in it is not finite.
    """
    given = read_array(path, "wavelets")
    if given.ndim not in (1, 2, 3):
        raise ValueError(f"{path}: wavelets of shape {given.shape}; one to three axes, time last")
    if not np.all(np.isfinite(given)):
        raise ValueError(f"{path}: a wavelet has samples that are not finite")
    wavelets = given.reshape((1,) * (2 - given.ndim) + given.shape) if given.ndim < 3 else given
    if wavelets.ndim == 2:
        wavelets = wavelets[:, None, :]
    fitting = np.zeros((*wavelets.shape[:2], steps))
    n = min(steps, wavelets.shape[-1])
    fitting[..., :n] = wavelets[..., :n]
    return fitting


def low_pass_gain(
    corner: float, samples: int, dt: float, order: int = 4
) -> Float[np.ndarray, " frequencies"]:
    """Gain of a zero-phase Butterworth low pass at the frequencies of `rfft` of `samples` samples.

    The squared magnitude of the filter of that order, 1 / (1 + (f / corner)^(2 order)): what
    filtering forwards and backwards in time amounts to. The corner, in Hz, is where it is 1/2.
    """
    frequencies = np.fft.rfftfreq(samples, dt)
    return 1 / (1 + (frequencies / corner) ** (2 * order))
