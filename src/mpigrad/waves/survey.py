"""Surveys: positions of sources and receivers, and source time functions."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import warnings

import numpy as np

from mpigrad.runtime.shapes import Float

__all__ = [
    "Survey",
    "low_pass_gain",
    "ricker",
]

# ---- Positions of the sources and receivers of a survey ----


@dataclasses.dataclass(frozen=True, eq=False)
class Survey:
    """Positions of the sources and receivers of one or more shots, the same on every rank.

    Coordinates are those of `Grid.centers()`, measured from the grid's first corner in the unit of
    its spacing. Points may lie between cell centres. Surveys are compared by identity, so make a
    survey once, outside functions that are differentiated or jitted.

    Parameters
    ----------
    sources
        Shape (n_shots, n_sources, axes), with 2 or 3 axes as the grid has.
    receivers
        Shape (n_shots, n_receivers, axes), or (1, n_receivers, axes) if all shots have the same
        ones.

    Raises
    ------
    ValueError
        If a shape is not as above, a coordinate is not finite, or the number of shots is 0.

    Examples
    --------
    Two shots with one source each. Three receivers record both of them:

    >>> import numpy as np
    >>> from mpigrad.waves import Survey
    >>> survey = Survey(
    ...     sources=np.array([[[120.0, 15.0]], [[480.0, 15.0]]]),
    ...     receivers=np.array([[[100.0, 15.0], [300.0, 15.0], [500.0, 15.0]]]),
    ... )
    >>> survey.n_shots, survey.n_sources, survey.n_receivers
    (2, 1, 3)
    """

    sources: Float[np.ndarray, "shots sources axes"]
    receivers: Float[np.ndarray, "_ receivers _"]

    def __post_init__(self) -> None:
        for name in ("sources", "receivers"):
            # Copied, because programs are compiled for these coordinates.
            points = np.array(getattr(self, name), np.float64)
            if points.ndim != 3 or points.shape[2] not in (2, 3):
                raise ValueError(
                    f"Survey: expected {name} of shape (shots, {name}, 2 or 3), got shape "
                    f"{points.shape}. Give one point, (x, y) or (x, y, z), for each of the "
                    f"{name} of each shot."
                )
            if not np.isfinite(points).all():
                raise ValueError(
                    f"Survey: {name} contain NaN or infinity. Give finite coordinates."
                )
            points.flags.writeable = False
            object.__setattr__(self, name, points)
        if self.sources.shape[2] != self.receivers.shape[2]:
            raise ValueError(
                f"Survey: got sources with {self.sources.shape[2]} coordinates and receivers with "
                f"{self.receivers.shape[2]}. Give both as many as the grid has axes."
            )
        if self.n_shots == 0:
            raise ValueError("Survey: expected at least one shot, got 0. Give at least one source.")
        if self.receivers.shape[0] not in (1, self.n_shots):
            raise ValueError(
                f"Survey: got receivers of {self.receivers.shape[0]} shots and sources of "
                f"{self.n_shots} shots. Give one set of receivers, or one set for each shot."
            )

    @property
    def n_shots(self) -> int:
        """Number of shots."""
        return self.sources.shape[0]

    @property
    def n_sources(self) -> int:
        """Number of sources of each shot."""
        return self.sources.shape[1]

    @property
    def n_receivers(self) -> int:
        """Number of receivers of each shot."""
        return self.receivers.shape[1]

    def digest(self) -> int:
        """Return a hash of 48 bits of all coordinates."""
        text = repr((self.sources.shape, self.receivers.shape)).encode()
        data = text + self.sources.tobytes() + self.receivers.tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big")


# ---- Source time functions ----


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
