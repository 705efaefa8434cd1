"""The reader of SEG-Y files, by segyio."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["SEGY", "SegyFile", "SegyLines", "read_segy", "read_segy_lines", "read_segy_window"]

SEGY = (".sgy", ".segy")


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
    """

    traces: NDArray[Any]
    interval: tuple[float, float] | None
    delay: float
    lines: tuple[int, int]
    velocity: float


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
    interval = (dt, min(1e-6, 5e-3 * dt)) if dt > 0 else None
    is_section = _is_section(inlines, crosslines, len(traces))
    lines = (1, len(traces)) if is_section else (inlines, crosslines)
    delay = float(np.max(np.abs(delays), initial=0.0)) / 1e3
    return SegyFile(traces, interval, delay, lines, velocity)


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
    velocity
        As in `SegyFile`.
    """

    inlines: NDArray[Any]
    crosslines: NDArray[Any]
    traces: NDArray[Any]
    n_traces: int
    samples: int
    is_section: bool
    velocity: float


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
    is_section = _is_section(len(inlines), len(crosslines), count)
    if is_section or len(inlines) * len(crosslines) > 10 * count:
        traces = np.full((min(len(inlines), 1), 1), -1)  # a section, or far from a grid
    else:
        traces = np.full((len(inlines), len(crosslines)), -1)
        traces[i, k] = np.arange(count)
    return SegyLines(inlines, crosslines, traces, count, samples, is_section, velocity)


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
