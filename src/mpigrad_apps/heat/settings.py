"""What a run of the heat equation is asked for."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Literal

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Heat in a plate: follow it in time, or recover the diffusivity kappa from thermometers."""

    cells: tuple[int, int] = (64, 64)
    """Number of cells along x and y, on the unit square."""
    duration: float = 0.1
    """The time that is simulated; heat crosses the plate in about 0.1 / kappa."""
    steps: int | None = None
    """Number of time steps; without: what the stable time step asks for, or 100 if implicit."""
    theta: float = 0.0
    """The scheme: 0 explicit, 0.5 Crank-Nicolson, 1 implicit."""
    boundary: Literal["zero", "insulated"] = "zero"
    """The edge of the plate is kept at u = 0, or nothing flows through it."""
    kappa: Literal["one", "quadratic", "hills"] = "hills"
    """The diffusivity: 1, 1 + x^2 + y^2, or two hills."""
    model: pathlib.Path | None = None
    """Your own diffusivity, one value per cell: an .npy file of shape (nx, ny)."""
    unknown: Literal["nothing", "cells", "network"] = "nothing"
    """What is recovered: nothing, kappa in each cell, or kappa as a neural network of (x, y)."""
    observed: float = 0.2
    """Fraction of the cells that have a thermometer, drawn at random."""
    noise: float = 0.0
    """Standard deviation of the thermometers' errors, by the root mean square of what they show."""
    smoothing: float = 0.0
    """Weight of the squared differences of log kappa between neighbouring cells, in the loss."""
    iterations: int = 60
    """Iterations of L-BFGS."""
    memory: int = 50
    """Number of past steps that L-BFGS remembers."""
    budget: int | None = None
    """Number of states u that a gradient may keep at a time; without: all."""
    seed: int = 0
    """Seed of the network's first weights, the thermometers' places and their errors."""
    restart: pathlib.Path | None = None
    """Parameters to start from: the network.eqx or cells.npy of an earlier run."""
    resume: bool = False
    """Go on from the saves of an earlier run with the same --out, where there are any."""
    frames: int = 40
    """Number of pictures in the animation."""
    out: pathlib.Path = pathlib.Path("results/heat")
    """Directory for the report, the pictures, the fields and the parameters."""

    def check(self) -> None:
        """Raise a ValueError that names the first setting which makes no sense."""
        nx, ny = self.cells
        if nx < 2 or ny < 2:
            raise ValueError(f"--cells: at least 2 cells along each axis, not {nx} x {ny}")
        if not (self.duration > 0 and math.isfinite(self.duration)):
            raise ValueError(f"--duration: a positive time, not {self.duration}")
        if not 0 <= self.theta <= 1:
            raise ValueError(f"--theta: between 0 and 1, not {self.theta}")
        if not 0 < self.observed <= 1:
            raise ValueError(f"--observed: a fraction in (0, 1], not {self.observed}")
        for option in ("steps", "iterations", "memory", "budget", "frames"):
            number = getattr(self, option)
            if number is not None and number < 1:
                raise ValueError(f"--{option}: at least 1, not {number}")
        for option in ("noise", "smoothing"):
            number = getattr(self, option)
            if not (number >= 0 and math.isfinite(number)):
                raise ValueError(f"--{option}: zero or positive, not {number}")
        for option in ("model", "restart"):
            file = getattr(self, option)
            if file is not None and not file.is_file():
                raise FileNotFoundError(f"--{option}: there is no file {file}")
