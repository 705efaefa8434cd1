"""The options of `mpigrad run heat`."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Literal

from mpigrad_apps.earlier_run import OutputCheck
from mpigrad_apps.option_effects import check_effects

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True)
class Settings(OutputCheck):
    """Heat in a plate: simulate it, or recover the diffusivity kappa from thermometers.

    The default size takes less than half a minute on two cores, and --unknown cells or network one
    to two minutes.
    """

    cells: tuple[int, int] = (64, 64)
    """Number of cells along x and y, on the unit square."""
    duration: float = 0.1
    """The simulated time. Heat crosses the plate in about 0.1 / kappa."""
    steps: int | None = None
    """Number of time steps. A simulation rounds it up to a multiple of --frames. By default as many
    as stability needs, or 100 for theta >= 0.5."""
    theta: float = 0.0
    """The scheme: 0 explicit, 0.5 Crank-Nicolson, 1 implicit."""
    boundary: Literal["zero", "insulated"] = "zero"
    """The edge of the plate is kept at u = 0, or is insulated."""
    kappa: Literal["one", "quadratic", "hills"] = "hills"
    """The diffusivity: 1, 1 + x^2 + y^2, or two hills."""
    model: pathlib.Path | None = None
    """Your own diffusivity, one value per cell: an .npy file of shape (nx, ny)."""
    unknown: Literal["nothing", "cells", "network"] = "nothing"
    """The unknown to recover: nothing, kappa in each cell, or kappa as a network of (x, y)."""
    observed: float = 0.2
    """Fraction of the cells that have a thermometer, drawn at random."""
    noise: float = 0.0
    """Standard deviation of the thermometers' errors, relative to their root mean square."""
    smoothing: float = 0.0
    """Weight of the squared differences of log kappa between neighbouring cells, in the loss."""
    iterations: int = 60
    """Iterations of L-BFGS."""
    memory: int = 50
    """Number of past steps that L-BFGS remembers."""
    budget: int | None = None
    """Number of states u that a gradient may store at a time. By default all."""
    seed: int = 0
    """Seed of the network's first weights, the positions of the thermometers and their errors."""
    restart: pathlib.Path | None = None
    """Parameters to start from: the network.eqx or cells.npy of an earlier run."""
    resume: bool = False
    """Continue from the saves of an earlier run with the same --out, if there are any."""
    overwrite: bool = False
    """Replace an earlier run with the same --out."""
    frames: int = 40
    """Number of pictures in the animation."""
    vtk: bool = False
    """Write the fields for ParaView, too: fields.pvti or fields.pvd."""
    out: pathlib.Path = pathlib.Path("results/heat")
    """Directory for the report, the pictures, the fields and the parameters."""

    def check(self) -> None:
        """Check the settings: raise a ValueError that names the first invalid option."""
        nx, ny = self.cells
        if nx < 2 or ny < 2:
            raise ValueError(f"--cells: expected at least 2 cells along each axis, got {nx} x {ny}")
        if not (self.duration > 0 and math.isfinite(self.duration)):
            raise ValueError(f"--duration: expected a positive time, got {self.duration}")
        if not 0 <= self.theta <= 1:
            raise ValueError(f"--theta: expected between 0 and 1, got {self.theta}")
        if not 0 < self.observed <= 1:
            raise ValueError(f"--observed: expected a fraction in (0, 1], got {self.observed}")
        for option in ("steps", "iterations", "memory", "budget", "frames"):
            number = getattr(self, option)
            if number is not None and number < 1:
                raise ValueError(f"--{option}: expected at least 1, got {number}")
        for option in ("noise", "smoothing"):
            number = getattr(self, option)
            if not (number >= 0 and math.isfinite(number)):
                raise ValueError(f"--{option}: expected zero or positive, got {number}")
        for option in ("model", "restart"):
            file = getattr(self, option)
            if file is not None and not file.is_file():
                raise FileNotFoundError(f"--{option}: there is no file {file}")
        inverse = "observed noise smoothing iterations memory budget seed restart"
        recovers = self.unknown != "nothing"
        check_effects(
            self,
            (recovers, "--unknown cells or --unknown network", inverse),
            (not recovers, "--unknown nothing", "frames"),
            (self.model is None, "no --model", "kappa"),
        )
