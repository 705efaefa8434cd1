"""The reader of SEG-Y files, by segyio."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "SEGY",
    "Distance",
    "SegyFile",
    "SegyLines",
    "read_segy",
    "read_segy_lines",
    "read_segy_window",
    "trace_distance",
]

SEGY = (".sgy", ".segy")
_EVEN = 1e-3  # relative difference of distances
_UNITS = {2: "arc seconds", 3: "degrees", 4: "degrees, minutes and seconds"}

Distance = tuple[float, float]  # of traces in m, and its uncertainty


class Positions(NamedTuple):
    """Coordinates of traces from CDP_X and CDP_Y.

    Attributes
    ----------
    points
        Shape (traces, 2), in the file's unit of length.
    resolution
        The largest unit of a coordinate.
    units
        The codes of their units, bytes 89-90.
    meters
        Factor that converts them to m.
    """

    points: NDArray[np.float64]
    resolution: float
    units: NDArray[Any]
    meters: float


class SegyFile(NamedTuple):
    """The traces of a SEG-Y file.

    Attributes
    ----------
    traces
        Shape (traces, samples).
    interval
        The time between samples in s, and its uncertainty. None if the header has no interval.
    delay
        The largest time of a first sample in s, by its absolute value.
    lines
        Numbers of inlines and crosslines, (1, traces) for a section.
    velocity
        Factor that converts velocities of the file to m/s.
    positions
        Coordinates of the traces.
    """

    traces: NDArray[Any]
    interval: tuple[float, float] | None
    delay: float
    lines: tuple[int, int]
    velocity: float
    positions: Positions


def read_segy(path: pathlib.Path) -> SegyFile:
    """Read the traces of a SEG-Y file.

    Raises
    ------
    ImportError
        If segyio is not installed.
    ValueError
        If a header word changes the meaning of the samples in a way that is not supported.
    """
    segyio = _segyio()
    with _open(path) as file:
        _check_weights(path, file)
        traces = np.asarray(file.trace.raw[:])
        dt = segyio.tools.dt(file, fallback_dt=0.0) / 1e6
        inlines, crosslines = (
            len(np.unique(file.attributes(field)[:]))
            for field in (segyio.TraceField.INLINE_3D, segyio.TraceField.CROSSLINE_3D)
        )
        velocity = _velocity_factor(path, file)
        delays = np.asarray(file.attributes(segyio.TraceField.DelayRecordingTime)[:], float)
        positions = _positions(file, velocity)
    interval = (dt, min(1e-6, 5e-3 * dt)) if dt > 0 else None
    is_section = _is_section(inlines, crosslines, len(traces))
    lines = (1, len(traces)) if is_section else (inlines, crosslines)
    delay = float(np.max(np.abs(delays), initial=0.0)) / 1e3
    return SegyFile(traces, interval, delay, lines, velocity, positions)


def _positions(file: Any, meters: float) -> Positions:
    fields = _segyio().TraceField
    x, y, scalars, units = (
        np.asarray(file.attributes(field)[:], float)
        for field in (fields.CDP_X, fields.CDP_Y, fields.SourceGroupScalar, fields.CoordinateUnits)
    )
    factors = np.where(scalars < 0, 1 / np.maximum(-scalars, 1), np.maximum(scalars, 1))
    points = np.stack([x, y], axis=1) * factors[:, None]
    return Positions(points, float(factors.max(initial=0.0)), units, meters)


def trace_distance(
    path: pathlib.Path, file: SegyFile | SegyLines, traces: NDArray[Any] | None = None
) -> Distance | None:
    """Return the distance of the traces of a line, None if the file has no coordinates.

    Parameters
    ----------
    traces
        Indices of the traces, in their order. Default: all.

    Raises
    ------
    ValueError
        If the coordinates are not lengths, or the distances vary.
    """
    points, resolution, units, meters = file.positions
    points = points if traces is None else points[traces]
    if len(points) < 2 or np.all(points == points[0]):
        return None
    other = [int(code) for code in np.unique(units) if code not in (0, 1)]
    if other:
        raise ValueError(
            f"{path}: expected coordinates in units of length, got "
            f"{_UNITS.get(other[0], f'the code {other[0]}')} in bytes 89-90 of a trace header. "
            "Convert CDP_X and CDP_Y, or set them to 0."
        )
    steps = np.hypot(*np.diff(points, axis=0).T)
    mean = float(np.mean(steps))
    if np.any(np.abs(steps - mean) > _EVEN * mean + 1.5 * resolution):
        k = int(np.argmax(np.abs(steps - mean)))
        raise ValueError(
            f"{path}: expected traces at one distance, got {meters * steps[0]:g} m between the "
            f"first ones and {meters * steps[k]:g} m between the traces {k} and {k + 1} in CDP_X "
            "and CDP_Y (bytes 181-188). Interpolate the file onto a regular grid."
        )
    # The ends are rounded, too, but over all distances.
    straight = float(np.hypot(*(points[-1] - points[0]))) / len(steps)
    bent = mean - straight > 1.5 * resolution
    error = 1.5 * resolution if bent else 1.5 * resolution / len(steps)
    distance = mean if bent else straight
    return meters * distance, meters * (error + _EVEN * distance)


def _is_section(inlines: int, crosslines: int, traces: int) -> bool:
    """Return whether the traces make a line: each of them has another inline or crossline."""
    return min(inlines, crosslines) < 2 or max(inlines, crosslines) == traces


def _velocity_factor(path: pathlib.Path, file: Any) -> float:
    """Return the factor that converts velocities to m/s, from the measurement system."""
    system = int(file.bin[_segyio().BinField.MeasurementSystem])
    if system not in (0, 1, 2):
        raise ValueError(
            f"{path}: expected 1 (metres), 2 (feet) or 0 as measurement system, got {system} in "
            "bytes 3255-3256 of the binary header. Correct the header."
        )
    return 0.3048 if system == 2 else 1.0


def _check_weights(path: pathlib.Path, file: Any) -> None:
    """Raise an error if samples are multiplied by powers of 2."""
    weights = file.attributes(_segyio().TraceField.TraceWeightingFactor)[:]
    if np.any(weights != 0):
        trace = int(np.flatnonzero(weights)[0])
        raise ValueError(
            f"{path}: expected no trace weighting factor, got {weights[trace]} in bytes 169-170 of "
            f"the header of trace {trace}, so its samples are multiplied by "
            f"2^{-int(weights[trace])}. Multiply them, and set the word to 0."
        )


def _open(path: pathlib.Path) -> Any:
    """Open a file. Little-endian ones are found by their format code."""
    with path.open("rb") as file:
        file.seek(3224)
        code = file.read(2)
    little = code[:1] != b"\0" and code[1:] == b"\0"
    return _segyio().open(
        str(path), strict=False, ignore_geometry=True, endian="little" if little else "big"
    )


class SegyLines(NamedTuple):
    """The inlines and crosslines of a SEG-Y file, without its samples.

    Attributes
    ----------
    inlines, crosslines
        Their numbers in the trace headers, sorted.
    traces
        Index of the trace of each inline and crossline, -1 if there is none.
    n_traces
        Number of traces.
    samples
        Number of samples of a trace.
    is_section
        True if the traces make a line.
    velocity, positions
        As in `SegyFile`.
    """

    inlines: NDArray[Any]
    crosslines: NDArray[Any]
    traces: NDArray[Any]
    n_traces: int
    samples: int
    is_section: bool
    velocity: float
    positions: Positions


def read_segy_lines(path: pathlib.Path) -> SegyLines:
    """Read the numbers of inlines and crosslines in the trace headers of a file (on one rank).

    Raises
    ------
    ImportError
        If segyio is not installed.
    """
    segyio = _segyio()
    with _open(path) as file:
        _check_weights(path, file)
        velocity = _velocity_factor(path, file)
        fields = segyio.TraceField.INLINE_3D, segyio.TraceField.CROSSLINE_3D
        (inlines, i), (crosslines, k) = (
            np.unique(file.attributes(field)[:], return_inverse=True) for field in fields
        )
        samples, count = len(file.samples), file.tracecount
        positions = _positions(file, velocity)
    is_section = _is_section(len(inlines), len(crosslines), count)
    if is_section or len(inlines) * len(crosslines) > 10 * count:
        traces = np.full((min(len(inlines), 1), 1), -1)  # a section, or far from a grid
    else:
        traces = np.full((len(inlines), len(crosslines)), -1)
        traces[i, k] = np.arange(count)
    return SegyLines(inlines, crosslines, traces, count, samples, is_section, velocity, positions)


def read_segy_window(
    path: pathlib.Path, traces: NDArray[Any], window: tuple[slice, ...]
) -> NDArray[Any]:
    """Read a window of the samples, one inline at a time (on this rank).

    Parameters
    ----------
    traces
        Index of the trace of each inline and crossline.
    window
        Slices of the inlines, the crosslines and the samples.
    """
    chosen, depths = traces[window[:2]], window[2]
    part = np.empty((*chosen.shape, depths.stop - depths.start))
    with _open(path) as file:
        for i, line in enumerate(chosen):
            if len(line) > 1 and np.all(np.diff(line) == 1):
                part[i] = file.trace.raw[int(line[0]) : int(line[-1]) + 1][:, depths]
                continue
            for k, trace in enumerate(line):
                part[i, k] = file.trace.raw[int(trace)][depths]
    return part


def _segyio() -> Any:
    try:
        import segyio
    except ImportError as error:
        raise ImportError(
            "mpigrad: SEG-Y files need segyio. Install it with pip install 'mpigrad[apps]'."
        ) from error
    return segyio
