"""Write SEG-Y files by segyio."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

__all__ = ["write_segy"]


def write_segy(
    path: pathlib.Path,
    traces: Any,
    lines: Sequence[tuple[int, int]] | None = None,
    milliseconds: float = 1.0,
    *,
    binary: Mapping[int, int] | None = None,
    words: Mapping[int, Any] | None = None,
    endian: str = "big",
) -> None:
    """Write traces, with the numbers of their inlines and crosslines.

    `binary` are words of the binary header, `words` those of trace headers (one for all, or one for
    each), by their first bytes.
    """
    segyio = pytest.importorskip("segyio")
    spec = segyio.spec()
    spec.samples = np.arange(traces.shape[1]) * milliseconds
    spec.tracecount, spec.format, spec.endian = len(traces), 5, endian
    with segyio.create(str(path), spec) as file:
        for i, trace in enumerate(traces):
            file.trace[i] = trace.astype(np.float32)
            inline, crossline = lines[i] if lines else (1, i)
            own = {k: int(np.broadcast_to(v, len(traces))[i]) for k, v in (words or {}).items()}
            fields = segyio.TraceField
            file.header[i] = {fields.INLINE_3D: inline, fields.CROSSLINE_3D: crossline, **own}
        file.bin.update(binary or {})
