"""What a run of the population problem is asked for."""

from __future__ import annotations

import dataclasses
import math
import pathlib

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """A drug in a population of patients: who absorbs and eliminates it how fast, and how surely is
    that known from a few blood samples of each?
    """

    data: pathlib.Path | None = None
    """Your own patients: a CSV file with columns id, time, amt, dv and wt; without: simulated."""
    patients: int = 16
    """Number of simulated patients."""
    typical: tuple[float, float, float, float, float] = (1.0, 5.0, 30.0, 10.0, 50.0)
    """ka (1/h), CL (L/h), V1 (L), Q (L/h), V2 (L): medians of the prior, each within a factor e."""
    flip_flop: bool = False
    """Allow an absorption slower than the decay in the blood: for depots that release slowly."""
    stiff: bool = False
    """Integrate by an implicit method."""
    rtol: float = 1e-5
    """Relative error of a step of the integration."""
    iterations: int = 400
    """Largest number of iterations of L-BFGS on the way to the mode."""
    chains: int = 2
    """Number of Markov chains, which go side by side."""
    warmup: int = 200
    """Iterations in which step sizes and metrics are found."""
    draws: int = 200
    """Draws from the posterior by each chain; 0: the mode is all."""
    acceptance: float = 0.8
    """Mean acceptance that the step sizes are found for."""
    depth: int = 8
    """A trajectory has 2^depth steps at most."""
    seed: int = 0
    """Seed of the simulated patients and of the chains."""
    out: pathlib.Path = pathlib.Path("results/population")
    """Directory for the report, the pictures, the draws and the patients' table."""

    def check(self) -> None:
        """Raise a ValueError that names the first setting which makes no sense."""
        if self.data is not None and not self.data.is_file():
            raise FileNotFoundError(f"--data: there is no file {self.data}")
        if self.data is not None and self.data.resolve() == (self.out / "patients.csv").resolve():
            raise ValueError(f"--out: the run's own patients.csv would replace {self.data}")
        if not all(value > 0 and math.isfinite(value) for value in self.typical):
            raise ValueError(f"--typical: five positive numbers, not {self.typical}")
        if not 1e-13 <= self.rtol <= 1e-2:
            raise ValueError(f"--rtol: between 1e-13 and 1e-2, not {self.rtol}")
        if not 0 < self.acceptance < 1:
            raise ValueError(f"--acceptance: between 0 and 1, not {self.acceptance}")
        for option in ("patients", "iterations", "chains", "depth"):
            number = getattr(self, option)
            if number < 1:
                raise ValueError(f"--{option}: at least 1, not {number}")
        if self.draws != 0 and self.draws < 4:
            raise ValueError(f"--draws: 0, or at least 4, not {self.draws}")
        if self.seed < 0:
            raise ValueError(f"--seed: at least 0, not {self.seed}")
        if self.warmup < 20:
            raise ValueError(f"--warmup: at least 20, not {self.warmup}")
