"""The result of an inversion."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Float

from mpigrad_apps.fitting import TrainingRecord
from mpigrad_apps.fwi.settings import Settings

__all__ = ["Result"]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of an inversion, the same on every rank apart from gathers and volumes.

    Attributes
    ----------
    parameters
        Parameters of the smallest loss of the last stage.
    fields
        The whole fields (nx, ny) of these parameters. Of a volume, this rank's tile.
    extremes
        The smallest and the largest value of each whole field.
    misfits
        Misfits of the start and of the result, without filter and regularization.
    errors
        Errors of the start and of the result (`Inversion.error`), None if the truth is not known.
    gathers
        Gathers of the start and of the result, for this group's shots.
    seconds
        Wall-clock time of the training.
    """

    settings: Settings
    parameters: Any
    fields: dict[str, Float[np.ndarray, "*cells"]]
    extremes: dict[str, tuple[float, float]]
    history: tuple[TrainingRecord, ...]
    ending: str
    misfits: tuple[float, float]
    errors: tuple[float, float] | None
    gathers: tuple[
        Float[np.ndarray, "shots _ receivers steps"], Float[np.ndarray, "shots _ receivers steps"]
    ]
    seconds: float
    report: pathlib.Path
