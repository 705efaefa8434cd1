"""The result of a run."""

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
    """The result of `run`: this rank's tiles, and values that are the same on all ranks.

    Attributes
    ----------
    settings, grid, parameters
        The settings, the grid, and the estimated parameters.
    kappa, u, true_kappa
        This rank's tiles, shape (lx, ly). `true_kappa` is None with a data file.
    history, ending
        The records of the training, and the reason why it ended.
    largest_error
        Largest error of kappa over all cells, or None with a data file.
    seconds
        Wall-clock time of the training in parts, means over ranks.
    report
        Path of the report.
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
