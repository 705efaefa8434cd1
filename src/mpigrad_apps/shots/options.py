"""The options that all commands about waves share. Imports neither JAX nor MPI."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Literal

__all__ = ["KernelOptions", "WaveOptions"]


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """Options of the kernels. See `WaveOptions`."""

    pml: int = 20
    precision: Literal["float32", "float64"] = "float32"
    method: Literal["native", "xla"] | None = None
    threads: int | None = None


@dataclasses.dataclass(frozen=True)
class WaveOptions:
    """A model of the ground and the shots at it."""

    model: pathlib.Path | None = None
    """Model file: .npy, .npz, .mat, SEG-Y or .zarr. Default: layers with a slow lens."""
    cells: tuple[int, int] = (120, 60)
    """Number of cells along x and y (downwards), if there is no model file."""
    spacing: tuple[float, float] | None = None
    """Size of a cell along x and y in m. Default: the model file's, or 10 10."""
    dt: float | None = None
    """Time step in s. Default: the file's, or 0.7 of the largest stable one."""
    steps: int | None = None
    """Number of time steps. Default: the file's, or enough for waves to cross the model twice."""
    frequency: float | None = None
    """Peak frequency of the Ricker wavelet in Hz. Default: 10 cells in the shortest wavelength."""
    wavelet: pathlib.Path | None = None
    """File of your own source time function, an array (steps,) or (shots, steps)."""
    shots: int | None = None
    """Number of shots, spread over x or selected from the file's. Default: the file's, or 4."""
    receivers: int | None = None
    """Number of receivers, spread over x. Default: the file's, or one per cell."""
    depth: float | None = None
    """Depth of sources and receivers in m. Default: the file's, or two cells."""
    survey: pathlib.Path | None = None
    """An .npz file of positions in m: sources (shots, 2) and receivers (k, 2)."""
    pml: int = 20
    """Number of cells of the absorbing layer on each side, outside of the model."""
    precision: Literal["float32", "float64"] = "float32"
    """Precision of the waves. Parameters and misfits are float64."""
    method: Literal["native", "xla"] | None = None
    """C++ kernels or XLA programs. Default: C++ on CPUs."""
    threads: int | None = None
    """Number of threads of the C++ kernels on each rank. Default: one."""
    groups: int = 1
    """Number of groups of ranks that share the shots. The ranks of a group divide the model."""

    @property
    def kernels(self) -> KernelOptions:
        """The options of the kernels."""
        return KernelOptions(self.pml, self.precision, self.method, self.threads)

    def check(self) -> None:
        """Raise a ValueError for the first option that is not valid."""
        if min(self.cells) < 8:
            raise ValueError(
                "--cells: expected at least 8 along each axis, got "
                f"{self.cells[0]} x {self.cells[1]}."
            )
        if self.spacing is not None:
            for length in self.spacing:
                _positive("--spacing", length)
        for option in ("dt", "frequency", "depth"):
            if getattr(self, option) is not None:
                _positive(f"--{option}", getattr(self, option))
        for option in ("steps", "shots", "receivers", "threads", "groups"):
            count = getattr(self, option)
            if count is not None and count < 1:
                raise ValueError(f"--{option}: expected at least 1, got {count}.")
        if self.pml < 0:
            raise ValueError(f"--pml: expected 0 or more cells, got {self.pml}.")
        for option in ("model", "wavelet", "survey"):
            exists(f"--{option}", getattr(self, option))


def _positive(option: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{option}: expected a positive number, got {value}.")


def exists(option: str, file: pathlib.Path | None) -> None:
    """Raise a FileNotFoundError if a file is given that does not exist."""
    if file is not None and not file.exists():
        raise FileNotFoundError(f"{option}: there is no file {file}")
