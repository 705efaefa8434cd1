"""The options of `mpigrad run population`."""

from __future__ import annotations

import dataclasses
import math
import pathlib

from mpigrad_apps.earlier_run import OutputCheck
from mpigrad_apps.option_effects import check_effects

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True)
class Settings(OutputCheck):
    """Estimate how patients absorb and eliminate a drug, from a few blood samples of each.

    The default size takes less than three minutes on two cores, of which one compiles. 100 patients
    (--patients 100 --chains 4 --warmup 200 --draws 200) take a few minutes more.
    """

    data: pathlib.Path | None = None
    """Your own patients: a CSV file with columns id, time, amt, dv, wt. By default simulated."""
    patients: int = 12
    """Number of simulated patients."""
    typical: tuple[float, float, float, float, float] = (1.0, 5.0, 30.0, 10.0, 50.0)
    """Medians of the prior, each with a factor e: ka (1/h), CL (L/h), V1 (L), Q (L/h), V2 (L)."""
    flip_flop: bool = False
    """Allow an absorption slower than the decay in the blood, for depots that release slowly."""
    stiff: bool = False
    """Integrate by an implicit method."""
    rtol: float = 1e-5
    """Relative error of a step of the integration."""
    iterations: int = 400
    """Largest number of iterations of L-BFGS in the search for the mode."""
    chains: int = 2
    """Number of Markov chains, which advance at the same time."""
    warmup: int = 150
    """Iterations of each chain that tune step sizes and metrics."""
    draws: int = 150
    """Draws from the posterior by each chain. 0 stops at the mode."""
    acceptance: float = 0.8
    """Mean acceptance that the step sizes are tuned for."""
    depth: int = 8
    """A trajectory has at most 2^depth steps."""
    seed: int = 0
    """Seed of the simulated patients and of the chains."""
    resume: bool = False
    """Continue from the saves of an earlier run with the same --out, if there are any."""
    overwrite: bool = False
    """Replace an earlier run with the same --out."""
    out: pathlib.Path = pathlib.Path("results/population")
    """Directory for the report, the pictures, the draws and the patients' table."""

    def check(self) -> None:
        """Check the settings: raise a ValueError that names the first invalid option."""
        if self.data is not None and not self.data.is_file():
            raise FileNotFoundError(f"--data: there is no file {self.data}")
        if self.data is not None and self.data.resolve() == (self.out / "patients.csv").resolve():
            raise ValueError(
                f"--out: the patients.csv of the run would replace {self.data}. Choose another "
                "directory."
            )
        if not all(value > 0 and math.isfinite(value) for value in self.typical):
            raise ValueError(f"--typical: expected five positive numbers, got {self.typical}")
        if not 1e-13 <= self.rtol <= 1e-2:
            raise ValueError(f"--rtol: expected between 1e-13 and 1e-2, got {self.rtol}")
        if not 0 < self.acceptance < 1:
            raise ValueError(f"--acceptance: expected between 0 and 1, got {self.acceptance}")
        for option in ("patients", "iterations", "chains", "depth"):
            number = getattr(self, option)
            if number < 1:
                raise ValueError(f"--{option}: expected at least 1, got {number}")
        if self.draws != 0 and self.draws < 4:
            raise ValueError(f"--draws: expected 0, or at least 4, got {self.draws}")
        if self.seed < 0:
            raise ValueError(f"--seed: expected at least 0, got {self.seed}")
        if self.warmup < 20:
            raise ValueError(f"--warmup: expected at least 20, got {self.warmup}")
        check_effects(
            self,
            (self.data is None, "no --data", "patients"),
            (self.draws > 0, "--draws above 0", "chains warmup acceptance depth"),
        )
