"""The options of `mpigrad run poisson`."""

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
    """Recover the diffusivity kappa in div(kappa grad u) = f from observations of u.

    The default size takes less than a minute on two cores. The size of Xu, Zhu and Darve (2020),
    -n 4 --cells 600 600, takes about half an hour.
    """

    cells: tuple[int, int] = (100, 100)
    """Number of cells along x and y."""
    iterations: int = 400
    """Iterations of L-BFGS."""
    kappa: Literal["network", "cells"] = "network"
    """Representation of kappa: a neural network of (x, y), or one value per cell."""
    truth: Literal["quadratic", "hills"] = "quadratic"
    """The kappa to be recovered without a data file: 1 + x^2 + y^2, or a hill and a hollow."""
    source: Literal["manufactured", "one"] = "manufactured"
    """The source f without a data file: the source of u = x(1-x)y(1-y), or 1 everywhere."""
    observed: float = 0.8
    """Fraction of the cells where u is observed, drawn at random."""
    noise: float = 0.0
    """Standard deviation of the observations' relative error."""
    bounds: tuple[float, float] | None = None
    """Lower and upper bound of kappa, kept by L-BFGS-B. For --kappa cells."""
    misfit: Literal["relative", "absolute"] = "relative"
    """The loss squares differences divided by the observed values, or plain differences."""
    data: pathlib.Path | None = None
    """Your own observations: an .npz file with coordinates (k, 2), values (k,) and source."""
    smoothing: float = 0.0
    """Weight of the squared differences of log kappa between neighbouring cells, in the loss."""
    memory: int = 50
    """Number of past steps that L-BFGS remembers."""
    tolerance: float = 1e-8
    """Relative residual at which a linear solve has converged."""
    guesses: int = 1
    """Number of earlier solutions from which a linear solve takes its first guess, or 0."""
    seed: int = 0
    """Seed of the network's first weights, the observed cells and the noise."""
    restart: pathlib.Path | None = None
    """Parameters to start from: the network.eqx or cells.npy of an earlier run."""
    resume: bool = False
    """Continue from the saves of an earlier run with the same --out, if there are any."""
    overwrite: bool = False
    """Replace an earlier run with the same --out."""
    vtk: bool = False
    """Write the fields for ParaView, too: fields.pvti."""
    out: pathlib.Path = pathlib.Path("results/poisson")
    """Directory for the report, the pictures, the fields and the parameters."""

    def check(self) -> None:
        """Check the settings: raise a ValueError that names the first invalid option."""
        nx, ny = self.cells
        if nx < 2 or ny < 2:
            raise ValueError(f"--cells: expected at least 2 cells along each axis, got {nx} x {ny}")
        if self.iterations < 1:
            raise ValueError(f"--iterations: expected at least 1, got {self.iterations}")
        if self.memory < 1:
            raise ValueError(f"--memory: expected at least 1, got {self.memory}")
        if self.bounds is not None:
            low, high = self.bounds
            if self.kappa != "cells":
                raise ValueError(f"--bounds: expected --kappa cells, got --kappa {self.kappa}")
            if not 0 < low < high < math.inf:
                raise ValueError(f"--bounds: expected 0 < low < high, got {low} and {high}")
        if not 0 < self.observed <= 1:
            raise ValueError(f"--observed: expected a fraction in (0, 1], got {self.observed}")
        if not (self.noise >= 0 and math.isfinite(self.noise)):
            raise ValueError(
                f"--noise: expected zero or a positive relative error, got {self.noise}"
            )
        if not (self.smoothing >= 0 and math.isfinite(self.smoothing)):
            raise ValueError(
                f"--smoothing: expected zero or a positive weight, got {self.smoothing}"
            )
        if not 0 < self.tolerance < 1:
            raise ValueError(f"--tolerance: expected between 0 and 1, got {self.tolerance}")
        if self.guesses < 0:
            raise ValueError(f"--guesses: expected at least 0, got {self.guesses}")
        for option, file in (("--data", self.data), ("--restart", self.restart)):
            if file is not None and not file.is_file():
                raise FileNotFoundError(f"{option}: there is no file {file}")
        check_effects(self, (self.data is None, "no --data", "truth source observed noise"))
