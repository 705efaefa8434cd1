"""Fixtures of the tests of applications."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def write_segy() -> Callable[..., None]:
    """Writes traces to a file, with the numbers of their inlines and crosslines.

    `binary` are words of the binary header, `words` those of all trace headers, by their first
    bytes.
    """
    segyio = pytest.importorskip("segyio")

    def write(
        path: pathlib.Path,
        traces: Any,
        lines: Sequence[tuple[int, int]] | None = None,
        milliseconds: float = 1.0,
        binary: Mapping[int, int] | None = None,
        words: Mapping[int, int] | None = None,
        endian: str = "big",
    ) -> None:
        spec = segyio.spec()
        spec.samples = np.arange(traces.shape[1]) * milliseconds
        spec.tracecount, spec.format, spec.endian = len(traces), 5, endian
        with segyio.create(str(path), spec) as file:
            for i, trace in enumerate(traces):
                file.trace[i] = trace.astype(np.float32)
                inline, crossline = lines[i] if lines else (1, i)
                file.header[i] = {
                    segyio.TraceField.INLINE_3D: inline,
                    segyio.TraceField.CROSSLINE_3D: crossline,
                    **(words or {}),
                }
            file.bin.update(binary or {})

    return write
