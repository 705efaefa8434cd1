"""What a full-waveform inversion is asked for."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Literal

from mpigrad_apps.shots.options import WaveOptions, exists

__all__ = ["Settings"]

_SETS = {
    "acoustic": (("vp",),),
    "elastic": (("lambda", "mu", "rho"), ("vp", "vs", "rho")),
}


@dataclasses.dataclass(frozen=True)
class Settings(WaveOptions):
    """Find the model of the ground whose waves are those that were recorded."""

    physics: Literal["acoustic", "elastic"] = "acoustic"
    """Which waves."""
    initial: pathlib.Path | None = None
    """Model file to start from; without: the model, smoothed by a Gaussian of 6 cells."""
    data: pathlib.Path | None = None
    """Recorded gathers (shots, receivers, steps); without: those of --model are computed."""
    noise: float = 0.0
    """Relative standard deviation of noise that is added to computed gathers."""
    invert: tuple[str, ...] = ("vp",)
    """The unknown fields: vp; elastic: of lambda mu rho, or of vp vs rho."""
    unknown: Literal["cells", "network"] = "cells"
    """What stands for a field: one value per cell, or a neural network of (x, y)."""
    fineness: float = 3.0
    """Half waves across the model that the network begins with (standard deviation)."""
    iterations: int = 50
    """Iterations of L-BFGS in each stage."""
    memory: int = 20
    """Number of past steps that L-BFGS remembers."""
    frequencies: tuple[float, ...] = ()
    """Corners in Hz of the low-pass filters of the first stages; the last stage has no filter."""
    normalize: Literal["none", "shot", "trace"] = "none"
    """What a residual is divided by before it is squared: nothing, its shot's or trace's norm."""
    smoothing: float = 0.0
    """Standard deviation in cells of the Gaussian through which cells are updated."""
    tikhonov: float = 0.0
    """Weight of the squared differences between neighbouring cells, in the loss."""
    total_variation: float = 0.0
    """Weight of the absolute differences between neighbouring cells, in the loss."""
    water: float = 0.0
    """Depth in m above which the start's values are kept."""
    mask: pathlib.Path | None = None
    """File of an array (nx, ny): cells where it is 0 keep the start's values."""
    bounds: tuple[str, ...] = ()
    """Smallest and largest values, as vp=1400:5000; without: half the start's and 1.5 times."""
    order: Literal[2, 4] = 4
    """Order of accuracy in space, of acoustic waves."""
    source: Literal["explosive", "force_x", "force_y"] = "explosive"
    """What a source of elastic waves does: press on all sides, or push along x or y."""
    seed: int = 0
    """Seed of the network's first weights and of the noise."""
    resume: bool = False
    """Go on from the saves of an earlier run with the same --out, where there are any."""
    out: pathlib.Path = pathlib.Path("results/fwi")
    """Directory for the report, the pictures, the model and the saves."""

    def check(self) -> None:
        """Raise a ValueError that names the first setting which makes no sense."""
        super().check()
        if not self.invert:
            raise ValueError("--invert: which fields are unknown?")
        if len(set(self.invert)) < len(self.invert) or not any(
            set(self.invert) <= set(names) for names in _SETS[self.physics]
        ):
            sets = " or of ".join(" ".join(names) for names in _SETS[self.physics])
            raise ValueError(
                f"--invert: for {self.physics} waves some of {sets}, not {' '.join(self.invert)}"
            )
        if not (self.fineness > 0 and math.isfinite(self.fineness)):
            raise ValueError(f"--fineness: a positive number, not {self.fineness}")
        if self.iterations < 1:
            raise ValueError(f"--iterations: at least 1, not {self.iterations}")
        if self.memory < 1:
            raise ValueError(f"--memory: at least 1, not {self.memory}")
        for option in ("noise", "smoothing", "tikhonov", "total_variation", "water"):
            value = getattr(self, option)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"--{option.replace('_', '-')}: 0 or more, not {value}")
        if any(not f > 0 for f in self.frequencies) or list(self.frequencies) != sorted(
            set(self.frequencies)
        ):
            raise ValueError(
                f"--frequencies: positive and rising, not {' '.join(map(str, self.frequencies))}"
            )
        self.limits()
        for option in ("initial", "data", "mask"):
            exists(f"--{option}", getattr(self, option))

    def limits(self) -> dict[str, tuple[float, float]]:
        """The bounds that were given, by field."""
        found = {}
        for text in self.bounds:
            name, _, span = text.partition("=")
            low, _, high = span.partition(":")
            try:
                found[name] = float(low), float(high)
            except ValueError:
                raise ValueError(f"--bounds: {text} is not like vp=1400:5000") from None
            if name not in self.invert:
                raise ValueError(f"--bounds: {name} is not among the unknown fields (--invert)")
            if not 0 <= found[name][0] < found[name][1] < math.inf:
                raise ValueError(f"--bounds: {text}: 0 or more, and rising, is expected")
        return found
