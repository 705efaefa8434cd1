"""Fixtures of the tests of applications."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def write_segy() -> Callable[..., None]:
    """Writes traces to a file, with the numbers of their inlines and crosslines."""
    segyio = pytest.importorskip("segyio")

    def write(
        path: pathlib.Path,
        traces: Any,
        lines: Sequence[tuple[int, int]] | None = None,
        milliseconds: float = 1.0,
    ) -> None:
        spec = segyio.spec()
        spec.samples = np.arange(traces.shape[1]) * milliseconds
        spec.tracecount, spec.format = len(traces), 5
        with segyio.create(str(path), spec) as file:
            for i, trace in enumerate(traces):
                file.trace[i] = trace.astype(np.float32)
                inline, crossline = lines[i] if lines else (1, i)
                file.header[i] = {
                    segyio.TraceField.INLINE_3D: inline,
                    segyio.TraceField.CROSSLINE_3D: crossline,
                }

    return write
