"""What a training run is asked for."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import pathlib
from typing import Literal

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """A convolutional network learns to read handwritten digits, or your own model what you give
    it, by stochastic gradients on several ranks: synchronous, through a parameter server, local.
    """

    mode: tuple[Literal["synchronous", "asynchronous", "local"], ...] = (
        "synchronous",
        "asynchronous",
        "local",
    )
    """One or more, which are trained one after the other from the same start."""
    framework: Literal["jax", "torch"] | None = None
    """Of the network; without: JAX. A model of your own tells it by itself."""
    module: str | None = None
    """Your own model, loss and data: file.py:factory, a function without arguments."""
    epochs: int = 10
    """How often every sample is met."""
    batch: int = 32
    """Samples of a batch, all ranks together."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """The optimizer, unless your factory gives one."""
    learning_rate: float = 0.02
    """Its learning rate."""
    momentum: float = 0.9
    """Of sgd."""
    accumulate: int = 1
    """Synchronous: parts that a rank computes its batch in, for lack of memory."""
    compression: Literal["none", "float16", "bfloat16"] = "none"
    """Synchronous: the type in which gradients travel."""
    clip: float | None = None
    """Synchronous: largest norm of a gradient."""
    staleness: tuple[int, ...] = (4,)
    """Asynchronous: updates that a gradient may be behind; a run for each number."""
    scale_by_staleness: bool = False
    """Asynchronous: divide a gradient by 1 + its staleness."""
    every: int = 8
    """Local: steps between two averages."""
    seed: int = 0
    """Of the first parameters and of the order of samples."""
    resume: bool = False
    """Go on from the saves of an earlier run with the same --out, where there are any."""
    out: pathlib.Path = pathlib.Path("results/sgd")
    """Directory for the report, the pictures, the histories and the parameters."""

    def check(self) -> None:
        """Raise a ValueError or an OSError that names the first setting which makes no sense."""
        for option in ("mode", "staleness"):
            if len(set(getattr(self, option))) < len(getattr(self, option)):
                raise ValueError(f"--{option}: the same one twice")
        if not self.mode:
            raise ValueError("--mode: one or more of synchronous, asynchronous, local")
        for option in ("epochs", "batch", "accumulate", "every"):
            number = getattr(self, option)
            if number < 1:
                raise ValueError(f"--{option}: at least 1, not {number}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed: in [0, 2**32), not {self.seed}")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"--learning-rate: a positive number, not {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"--momentum: in [0, 1), not {self.momentum}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"--clip: a positive norm, not {self.clip}")
        if not self.staleness or min(self.staleness) < 0:
            raise ValueError(f"--staleness: numbers of updates, 0 or more, not {self.staleness}")
        if self.framework == "torch" and importlib.util.find_spec("torch") is None:
            raise ValueError(
                "--framework torch: torch is not installed: pip install 'mpigrad[torch]'"
            )
        if self.module is not None:
            file, colon, name = self.module.rpartition(":")
            if not (colon and name.isidentifier()):
                raise ValueError(f"--module: file.py:factory, not {self.module}")
            if not pathlib.Path(file).is_file():
                raise FileNotFoundError(f"--module: there is no file {file}")
