"""What a run of acoustic waves is asked for."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal

from mpigrad_apps.shots.options import WaveOptions

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True)
class Settings(WaveOptions):
    """Shoot at a velocity model: shot gathers, wavefield snapshots and an animation."""

    order: Literal[2, 4] = 4
    """Order of accuracy in space."""
    frames: int = 40
    """Number of snapshots of the first shot's wavefield; 0: none."""
    out: pathlib.Path = pathlib.Path("results/acoustic")
    """Directory for the report, the pictures, the gathers and the snapshots."""

    def check(self) -> None:
        """Raise a ValueError that names the first setting which makes no sense."""
        super().check()
        if self.frames < 0:
            raise ValueError(f"--frames: 0 or more, not {self.frames}")
