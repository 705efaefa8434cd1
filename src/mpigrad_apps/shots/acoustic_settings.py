"""The settings of `mpigrad run acoustic`."""

from __future__ import annotations

import dataclasses
import pathlib

from mpigrad_apps.earlier_run import OutputCheck
from mpigrad_apps.option_effects import check_effects
from mpigrad_apps.shots.options import WaveOptions

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True)
class Settings(OutputCheck, WaveOptions):
    """Propagate shots through a velocity model: gathers, wavefield snapshots, an animation.

    The default size takes less than half a minute on two cores. The time grows with the number of
    shots, steps and cells.
    """

    frames: int = 40
    """Number of snapshots of the first shot's wavefield, 0 for none."""
    overwrite: bool = False
    """Replace an earlier run with the same --out."""
    vtk: bool = False
    """Write the fields for ParaView, too: snapshots.pvd."""
    out: pathlib.Path = pathlib.Path("results/acoustic")
    """Directory for the report, the pictures, the gathers and the snapshots."""

    def check(self) -> None:
        """Raise a ValueError for the first setting that is not valid."""
        super().check()
        if self.frames < 0:
            raise ValueError(f"--frames: expected 0 or more, got {self.frames}.")
        check_effects(self, (self.frames > 0, "--frames above 0", "vtk"))
