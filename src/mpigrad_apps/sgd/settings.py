"""The options of `mpigrad run sgd`."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import pathlib
from typing import Literal

from mpigrad_apps.earlier_run import OutputCheck
from mpigrad_apps.option_effects import check_effects

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True)
class Settings(OutputCheck):
    """Train a network that reads handwritten digits, or your own model, by stochastic gradients.

    The modes are synchronous, asynchronous (through a parameter server) and local.
    The default size takes less than half a minute on two cores.
    """

    mode: tuple[Literal["synchronous", "asynchronous", "local"], ...] = (
        "synchronous",
        "asynchronous",
        "local",
    )
    """One or more modes. The run trains with one after the other from the same start."""
    framework: Literal["jax", "torch"] | None = None
    """Framework of the network, by default JAX. It is detected for a model of your own."""
    module: str | None = None
    """Your own model, loss and data: file.py:factory, a function without arguments."""
    epochs: int = 10
    """Number of passes over all samples."""
    batch: int = 32
    """Number of samples of a batch, over all ranks."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """The optimizer, unless your factory returns one."""
    learning_rate: float = 0.02
    """Learning rate of the optimizer."""
    momentum: float = 0.9
    """Momentum of sgd."""
    accumulate: int = 1
    """Synchronous: number of parts of a rank's batch, to save memory."""
    compression: Literal["none", "float16", "bfloat16"] = "none"
    """Synchronous: the type in which gradients are sent."""
    clip: float | None = None
    """Synchronous: largest norm of a gradient."""
    staleness: tuple[int, ...] = (4,)
    """Asynchronous: largest staleness of a gradient, in updates. One training for each value."""
    scale_by_staleness: bool = False
    """Asynchronous: divide each gradient by 1 + its staleness."""
    every: int = 8
    """Local: steps between two averages."""
    seed: int = 0
    """Seed of the first parameters and of the order of samples."""
    resume: bool = False
    """Continue from the saves of an earlier run with the same --out, if there are any."""
    overwrite: bool = False
    """Replace an earlier run with the same --out."""
    out: pathlib.Path = pathlib.Path("results/sgd")
    """Directory for the report, the pictures, the histories and the parameters."""

    def check(self) -> None:
        """Check the settings: raise a ValueError or OSError that names the first invalid option."""
        for option in ("mode", "staleness"):
            if len(set(getattr(self, option))) < len(getattr(self, option)):
                raise ValueError(f"--{option}: expected different values, got one of them twice")
        if not self.mode:
            raise ValueError("--mode: expected one or more of synchronous, asynchronous, local")
        for option in ("epochs", "batch", "accumulate", "every"):
            number = getattr(self, option)
            if number < 1:
                raise ValueError(f"--{option}: expected at least 1, got {number}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed: expected in [0, 2**32), got {self.seed}")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(
                f"--learning-rate: expected a positive number, got {self.learning_rate}"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"--momentum: expected in [0, 1), got {self.momentum}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"--clip: expected a positive norm, got {self.clip}")
        if not self.staleness or min(self.staleness) < 0:
            raise ValueError(
                f"--staleness: expected numbers of updates, 0 or more, got {self.staleness}"
            )
        if self.framework == "torch" and importlib.util.find_spec("torch") is None:
            raise ValueError(
                "--framework torch: torch is not installed. Run pip install 'mpigrad[torch]'"
            )
        if self.module is not None:
            file, colon, name = self.module.rpartition(":")
            if not (colon and name.isidentifier()):
                raise ValueError(f"--module: expected file.py:factory, got {self.module}")
            if not pathlib.Path(file).is_file():
                raise FileNotFoundError(f"--module: there is no file {file}")
        check_effects(
            self,
            ("synchronous" in self.mode, "--mode synchronous", "accumulate compression clip"),
            ("asynchronous" in self.mode, "--mode asynchronous", "staleness scale_by_staleness"),
            ("local" in self.mode, "--mode local", "every"),
            (self.optimizer == "sgd", "--optimizer sgd", "momentum"),
        )
