"""What a run gives."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad.grid import Grid
from mpigrad_apps.fitting import TrainingRecord
from mpigrad_apps.poisson.settings import Settings

__all__ = ["PoissonResult"]


@dataclasses.dataclass(frozen=True)
class PoissonResult:
    """What a run gives: this rank's tiles, and what is the same on every rank.

    `kappa`, `u` and `true_kappa` (None with a data file) have shape (lx, ly). `seconds` has the
    wall-clock time of the training in parts, as means over ranks.
    """

    settings: Settings
    grid: Grid
    parameters: Any
    kappa: NDArray[np.float64]
    u: NDArray[np.float64]
    true_kappa: NDArray[np.float64] | None
    history: tuple[TrainingRecord, ...]
    ending: str
    largest_error: float | None
    seconds: dict[str, float]
    report: pathlib.Path
