"""The options that all commands about waves share. Imports neither JAX nor MPI."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import ClassVar, Literal

from mpigrad_apps.option_effects import check_effects

__all__ = ["KernelOptions", "WaveOptions", "check_quality", "exists"]


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """Options of the kernels. See `WaveOptions`."""

    pml: int = 20
    precision: Literal["float32", "float64"] = "float32"
    backend: Literal["native", "xla"] | None = None
    threads: int | None = None
    free_surface: bool = False
    order: Literal[4, 8] = 4


@dataclasses.dataclass(frozen=True)
class WaveOptions:
    """A model of the ground and the shots at it."""

    volumes: ClassVar[bool] = False  # whether the command takes models with three axes

    model: pathlib.Path | None = None
    """Model file: .npy, .npz, .mat, SEG-Y or .zarr. Default: layers with a slow lens."""
    cells: tuple[int, ...] = (120, 60)
    """Number of cells along each axis, the last one downwards, if there is no model file."""
    spacing: tuple[float, ...] | None = None
    """Size of a cell along each axis in m. Default: the model file's, or 10."""
    dt: float | None = None
    """Time step in s. Default: the file's, or 0.7 of the largest stable one (order 8: 0.77)."""
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
    order: Literal[4, 8] = 4
    """Order of accuracy in space."""
    pml: int | None = None
    """Cells of the absorbing layer on each side, outside of the model. Default: 20, volumes 10."""
    free_surface: bool = False
    """No layer at the top: the pressure is zero there. Elastic waves: the traction is zero."""
    precision: Literal["float32", "float64"] = "float32"
    """Precision of the waves. Parameters and misfits are float64."""
    backend: Literal["native", "xla"] | None = None
    """C++ kernels or XLA programs. Default: C++ on CPUs."""
    threads: int | None = None
    """Number of threads of the C++ kernels on each rank. Default: one."""
    groups: int = 1
    """Number of groups of ranks that share the shots. The ranks of a group divide the model."""

    def kernels(self, axes: int) -> KernelOptions:
        """Return the options of the kernels for a model with this number of axes."""
        pml = (20 if axes == 2 else 10) if self.pml is None else self.pml
        return KernelOptions(
            pml, self.precision, self.backend, self.threads, self.free_surface, self.order
        )

    def check(self) -> None:
        """Raise a ValueError for the first option that is not valid."""
        self._check_axes()
        if min(self.cells) < 8:
            raise ValueError(
                "--cells: expected at least 8 along each axis, got "
                f"{' x '.join(map(str, self.cells))}."
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
        if self.pml is not None and self.pml < 0:
            raise ValueError(f"--pml: expected 0 or more cells, got {self.pml}.")
        for option in ("model", "wavelet", "survey"):
            exists(f"--{option}", getattr(self, option))
        check_effects(
            self,
            (self.survey is None, "no --survey", "depth"),
            (self.backend != "xla", "--backend native", "threads"),
        )

    def _check_axes(self) -> None:
        """Raise a ValueError if the number of cells or lengths is not that of possible axes."""
        expected = "two or three" if self.volumes else "two"
        for option, sizes in (("--cells", self.cells), ("--spacing", self.spacing)):
            if sizes is None or len(sizes) == 2 or (len(sizes) == 3 and self.volumes):
                continue
            hint = "" if self.volumes or len(sizes) != 3 else " Volumes: mpigrad run fwi."
            raise ValueError(
                f"{option}: expected {expected} numbers, one for each axis, got {len(sizes)}.{hint}"
            )


def _positive(option: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{option}: expected a positive number, got {value}.")


def check_quality(quality: tuple[float, ...]) -> None:
    """Raise a ValueError unless there are up to two quality factors, larger than one."""
    if len(quality) > 2 or not all(q > 1 and math.isfinite(q) for q in quality):
        raise ValueError(
            "--quality: expected one or two finite numbers larger than 1, those of P and S waves, "
            f"got {' '.join(map(str, quality))}."
        )


def exists(option: str, file: pathlib.Path | None) -> None:
    """Raise a FileNotFoundError if a file is given that does not exist."""
    if file is not None and not file.exists():
        raise FileNotFoundError(f"{option}: there is no file {file}")
