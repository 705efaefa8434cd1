"""Surveys: positions of sources and receivers, source time functions, and interpolation."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
import warnings
from collections.abc import Sequence

import numpy as np

from mpigrad.extend import Float, Int
from mpigrad.waves.absorbing import WaveTile

__all__ = [
    "PointTable",
    "Survey",
    "low_pass_gain",
    "point_table",
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
    frequency: float, dt: float, steps: int, peak_time: float | None = None
) -> Float[np.ndarray, " steps"]:
    """Return a Ricker wavelet sampled at t = 0, dt, 2 dt, ...

    The wavelet is (1 - 2 a) exp(-a) with a = (pi f (t - t0))^2.

    Parameters
    ----------
    frequency
        Frequency f of the peak of the spectrum, in Hz. Beyond about 2.7 f the spectrum is below a
        hundredth of the peak.
    dt
        Time between samples, in s.
    steps
        Number of samples.
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
    >>> wavelet = ricker(15.0, dt=2e-3, steps=150)
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
    steps = operator.index(steps)
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


# ---- Kaiser-windowed sinc interpolation of sources and receivers between cell centres ----
#
# Hicks, "Arbitrary source and receiver positioning in finite-difference schemes using Kaiser
# windowed sinc functions", Geophysics 67 (2002).


_HALF_WIDTH = 4
_NODES = 6  # of the polynomial next to a surface
_SHAPE = 6.31  # of the Kaiser window, for at least four cells per wavelength (Hicks, table 1)


@dataclasses.dataclass(frozen=True, eq=False)
class PointTable:
    """This rank's cells around each of n points, in compressed rows.

    Point p is the sum of weights[k] times the value in cell cells[k] for k from starts[p] to
    starts[p + 1]. `cells` are indices into this rank's wave tile in C order. The sum over all ranks
    gives the value at the point.
    """

    starts: Int[np.ndarray, " n1"]
    cells: Int[np.ndarray, " k"]
    weights: Float[np.ndarray, " k"]

    @property
    def points(self) -> Int[np.ndarray, " k"]:
        """Index of the point of each cell and weight."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


def point_table(
    points: Float[np.ndarray, "n axes"],
    tile: WaveTile,
    what: str = "points",
    offset: Sequence[float] | None = None,
    surface: tuple[int, int] | None = None,
) -> PointTable:
    """Return the cells and weights of points anywhere in the model.

    Along each axis the weight of a cell x cells away is sinc(x) w(x), with a Kaiser window w of
    half width 4. A point on a cell centre uses that cell only, with weight 1. Cells of absorbing
    layers are used too. Beyond them, or beyond a side without a layer, the field is zero.

    Parameters
    ----------
    points
        Coordinates in the unit of the grid's spacing.
    what
        Name of the points in errors.
    offset
        Place of the interpolated values, in cells from the cell centres. Default: there.
    surface
        Axis and end (0 or 1) of a side that interpolation does not cross. Next to it, along this
        axis, it uses the polynomial through the six nearest values.

    Raises
    ------
    ValueError
        On all ranks, if a point lies outside the model, or lacks a coordinate for an axis.
    """
    grid = tile.grid
    if points.shape[1] != grid.ndim:
        raise ValueError(
            f"mpigrad.waves: the {what} have {points.shape[1]} coordinates, but the grid has "
            f"{grid.ndim} axes. Give {grid.ndim} coordinates for each of the {what}."
        )
    size = np.array([n * h for n, h in zip(grid.shape, grid.spacing, strict=True)])
    outside = ((points < 0) | (points > size)).any(axis=1)
    if outside.any():
        first = int(np.argmax(outside))
        raise ValueError(
            f"mpigrad.waves: {int(outside.sum())} of {len(points)} {what} lie outside the model, "
            f"the first has index {first} and is at {tuple(float(x) for x in points[first])}. The "
            f"model reaches from {(0,) * grid.ndim} to {tuple(float(x) for x in size)}. Move them "
            "into it."
        )
    weights, cells = np.ones((len(points), 1)), np.zeros((len(points), 1), int)
    for axis, shift in enumerate(offset or (0.0,) * grid.ndim):
        end = surface[1] if surface and surface[0] == axis else None
        index, weight = _along(points[:, axis], tile, axis, shift, end)
        weights = (weights[:, :, None] * weight[:, None, :]).reshape(len(points), -1)
        cells = (cells[:, :, None] * tile.shape[axis] + index[:, None, :]).reshape(len(points), -1)
    used = weights != 0
    counts = used.sum(axis=1)
    return PointTable(np.concatenate([[0], np.cumsum(counts)]), cells[used], weights[used])


def _along(
    coordinates: np.ndarray, tile: WaveTile, axis: int, offset: float, end: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return cells (n, 8) and their weights along an axis, 0 for cells outside this rank's tile."""
    place = coordinates / tile.grid.spacing[axis] - 0.5 - offset
    place = np.where(np.abs(place - np.rint(place)) < 1e-9, np.rint(place), place)
    first = np.floor(place).astype(int) - _HALF_WIDTH + 1
    cells = first[:, None] + np.arange(2 * _HALF_WIDTH)
    x = cells - place[:, None]
    window = np.i0(_SHAPE * np.sqrt(np.maximum(1 - (x / _HALF_WIDTH) ** 2, 0))) / np.i0(_SHAPE)
    # np.sinc of a whole number is not exactly zero
    weights = np.where(x == np.rint(x), x == 0, np.sinc(x)) * window
    if end is not None:
        edge = (0, tile.grid.shape[axis] - 1)[end]
        crosses = (cells[:, :1] < edge) if end == 0 else (cells[:, -1:] > edge)
        near = np.arange(2 * _HALF_WIDTH) + (edge if end == 0 else edge - 2 * _HALF_WIDTH + 1)
        cells = np.where(crosses, near, cells)
        exact = (place == np.rint(place))[:, None]
        polynomial = np.where(exact, cells == place[:, None], _polynomial(cells, place, edge, end))
        weights = np.where(crosses, polynomial, weights)
    local = cells - tile.origin[axis]
    inside = (local >= 0) & (local < tile.shape[axis])
    return np.where(inside, local, 0), np.where(inside, weights, 0)


def _polynomial(cells: np.ndarray, place: np.ndarray, edge: int, end: int) -> np.ndarray:
    """Return the weights of `cells` (n, 8) in the polynomial through the six nearest inside."""
    middle = np.floor(place).astype(int) - 2
    first = np.maximum(middle, edge) if end == 0 else np.minimum(middle, edge - _NODES + 1)
    weights = np.zeros(cells.shape)
    for k in range(_NODES):
        node = first + k
        others = [first + j for j in range(_NODES) if j != k]
        value = np.prod([(place - x) / (node - x) for x in others], axis=0)
        weights += np.where(cells == node[:, None], value[:, None], 0)
    return weights
