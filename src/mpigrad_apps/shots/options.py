"""What every command about waves is asked for; imports neither JAX nor MPI."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Literal

__all__ = ["WaveOptions"]


@dataclasses.dataclass(frozen=True)
class WaveOptions:
    """A model of the ground, and how it is shot at."""

    model: pathlib.Path | None = None
    """Model file: .npy, .npz, .mat, SEG-Y or .zarr; without: layers with a lens in them."""
    cells: tuple[int, int] = (120, 60)
    """Number of cells along x and y (downwards) where there is no model file."""
    spacing: tuple[float, float] | None = None
    """Size of a cell along x and y in m, where the model file doesn't say; without: 10 10."""
    dt: float | None = None
    """Time step in s; without: the file's, or 0.7 of the largest stable one."""
    steps: int | None = None
    """Number of time steps; without: the file's, or until waves have crossed the model twice."""
    frequency: float | None = None
    """Peak of the Ricker wavelet in Hz; without: the wavelet is 10 cells long at least."""
    wavelet: pathlib.Path | None = None
    """Your own source time function: an array (steps,) or (shots, steps) in a file."""
    shots: int | None = None
    """Number of shots, spread over x or taken from the file's; without: the file's, or 4."""
    receivers: int | None = None
    """Number of receivers, spread over x; without: the file's, or one per cell."""
    depth: float | None = None
    """Depth of sources and receivers in m; without: the file's, or two cells."""
    survey: pathlib.Path | None = None
    """Positions in m: an .npz file with sources (shots, 2) and receivers (k, 2)."""
    pml: int = 20
    """Cells of absorbing layer on each side, outside of the model."""
    precision: Literal["float32", "float64"] = "float32"
    """Of the waves; parameters and misfits are float64."""
    method: Literal["native", "xla"] | None = None
    """C++ kernels or XLA programs; without: C++ on CPUs."""
    threads: int | None = None
    """Threads of the C++ kernels on each rank; without: one."""
    groups: int = 1
    """Groups of ranks that share the shots; a group divides the model among its ranks."""

    def check(self) -> None:
        """Raise a ValueError that names the first setting which makes no sense."""
        if min(self.cells) < 8:
            raise ValueError(
                f"--cells: at least 8 along each axis, not {self.cells[0]} x {self.cells[1]}"
            )
        if self.spacing is not None:
            for length in self.spacing:
                _positive("--spacing", length)
        for option in ("dt", "frequency", "depth"):
            if getattr(self, option) is not None:
                _positive(f"--{option}", getattr(self, option))
        for option in ("steps", "shots", "receivers", "threads", "groups"):
            number = getattr(self, option)
            if number is not None and number < 1:
                raise ValueError(f"--{option}: at least 1, not {number}")
        if self.pml < 0:
            raise ValueError(f"--pml: 0 or more cells, not {self.pml}")
        for option in ("model", "wavelet", "survey"):
            exists(f"--{option}", getattr(self, option))


def _positive(option: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{option}: a positive number, not {value}")


def exists(option: str, file: pathlib.Path | None) -> None:
    """Raise a FileNotFoundError where a file is named that isn't there."""
    if file is not None and not file.exists():
        raise FileNotFoundError(f"{option}: there is no file {file}")
