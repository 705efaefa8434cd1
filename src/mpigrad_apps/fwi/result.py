"""What an inversion gives."""

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
    """What an inversion gives; the same on every rank, but for the gathers.

    Attributes
    ----------
    parameters
        Those of the smallest loss of the last stage.
    fields
        The whole fields (nx, ny) that they stand for.
    misfits
        Of the start and of the result, without filter and regularization; d = 0 has 1.
    errors
        Of the start and of the result (`Inversion.error`), None where the truth isn't known.
    gathers
        Of the start and of the result, of this group's shots.
    seconds
        Wall-clock time of the training.
    """

    settings: Settings
    parameters: Any
    fields: dict[str, Float[np.ndarray, "nx ny"]]
    history: tuple[TrainingRecord, ...]
    ending: str
    misfits: tuple[float, float]
    errors: tuple[float, float] | None
    gathers: tuple[
        Float[np.ndarray, "shots _ receivers steps"], Float[np.ndarray, "shots _ receivers steps"]
    ]
    seconds: float
    report: pathlib.Path
