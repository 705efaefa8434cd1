"""The reader of SEG-Y files, by segyio."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["SEGY", "SegyLines", "read_segy", "read_segy_lines", "read_segy_window"]

SEGY = (".sgy", ".segy")


def read_segy(
    path: pathlib.Path,
) -> tuple[NDArray[Any], tuple[float, float] | None, tuple[int, int]]:
    """Read the traces of a SEG-Y file.

    Returns
    -------
    The traces, shape (traces, samples), the time between samples in s with its uncertainty (None if
    the header has no interval), and the numbers of inlines and crosslines.

    Raises
    ------
    ImportError
        If segyio is not installed.
    """
    segyio = _segyio()
    with segyio.open(str(path), strict=False, ignore_geometry=True) as file:
        traces = np.asarray(file.trace.raw[:])
        dt = segyio.tools.dt(file, fallback_dt=0.0) / 1e6
        inlines, crosslines = (
            len(np.unique(file.attributes(field)[:]))
            for field in (segyio.TraceField.INLINE_3D, segyio.TraceField.CROSSLINE_3D)
        )
    interval = (dt, min(1e-6, 5e-3 * dt)) if dt > 0 else None
    return traces, interval, (inlines, crosslines)


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
    """

    inlines: NDArray[Any]
    crosslines: NDArray[Any]
    traces: NDArray[Any]
    n_traces: int
    samples: int


def read_segy_lines(path: pathlib.Path) -> SegyLines:
    """Read the numbers of inlines and crosslines in the trace headers of a file (on one rank).

    Raises
    ------
    ImportError
        If segyio is not installed.
    """
    segyio = _segyio()
    with segyio.open(str(path), strict=False, ignore_geometry=True) as file:
        fields = segyio.TraceField.INLINE_3D, segyio.TraceField.CROSSLINE_3D
        (inlines, i), (crosslines, k) = (
            np.unique(file.attributes(field)[:], return_inverse=True) for field in fields
        )
        samples, count = len(file.samples), file.tracecount
    if min(len(inlines), len(crosslines)) < 2 or len(inlines) * len(crosslines) > 10 * count:
        traces = np.full((min(len(inlines), 1), 1), -1)  # a section, or far from a grid
    else:
        traces = np.full((len(inlines), len(crosslines)), -1)
        traces[i, k] = np.arange(count)
    return SegyLines(inlines, crosslines, traces, count, samples)


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
    with _segyio().open(str(path), strict=False, ignore_geometry=True) as file:
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
