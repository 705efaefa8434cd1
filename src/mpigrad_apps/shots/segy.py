"""The reader of SEG-Y files, by segyio."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SEGY", "read_segy"]

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
    try:
        import segyio
    except ImportError as error:
        raise ImportError(
            "mpigrad: SEG-Y files need segyio. Install it with pip install 'mpigrad[apps]'."
        ) from error
    with segyio.open(str(path), strict=False, ignore_geometry=True) as file:
        traces = np.asarray(file.trace.raw[:])
        dt = segyio.tools.dt(file, fallback_dt=0.0) / 1e6
        inlines, crosslines = (
            len(np.unique(file.attributes(field)[:]))
            for field in (segyio.TraceField.INLINE_3D, segyio.TraceField.CROSSLINE_3D)
        )
    interval = (dt, min(1e-6, 5e-3 * dt)) if dt > 0 else None
    return traces, interval, (inlines, crosslines)
