"""The settings of a full-waveform inversion."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import ClassVar, Literal

from mpigrad_apps.earlier_run import OutputCheck
from mpigrad_apps.option_effects import check_effects
from mpigrad_apps.shots.options import WaveOptions, check_quality, exists

__all__ = ["Settings"]

_SETS = {
    "acoustic": (("vp",),),
    "elastic": (("lambda", "mu", "rho"), ("vp", "vs", "rho")),
}


@dataclasses.dataclass(frozen=True)
class Settings(OutputCheck, WaveOptions):
    """Find the model of the ground that explains recorded waves.

    A model with two axes, or a volume with three: --cells 32 32 24, or the file of one. The default
    size takes less than a minute on two cores. The Marmousi2 model with 8 shots and 200 iterations
    takes about two minutes.
    """

    volumes: ClassVar[bool] = True

    physics: Literal["acoustic", "elastic"] = "acoustic"
    """Kind of the waves."""
    initial: pathlib.Path | None = None
    """Model file to start from. Default: the model, smoothed by a Gaussian of 6 cells."""
    data: pathlib.Path | None = None
    """Recorded gathers (shots, receivers, steps). Default: computed for --model."""
    noise: float = 0.0
    """Relative standard deviation of the noise that is added to computed gathers."""
    invert: tuple[str, ...] = ("vp",)
    """The unknown fields: vp. Elastic: some of lambda mu rho, or of vp vs rho."""
    unknown: Literal["cells", "network"] = "cells"
    """Parametrization of a field: one value per cell, or a neural network of the position."""
    fineness: float = 3.0
    """Standard deviation of the network's initial numbers of half waves across the model."""
    iterations: int = 50
    """Number of iterations of L-BFGS in each stage, or in each round of a stage."""
    rounds: int = 1
    """Number of rounds in each stage. Each one draws its shots and begins L-BFGS again."""
    subset: int | None = None
    """Number of random shots in each round. Default: all shots."""
    encode: bool = False
    """In each round, each group adds up its shots with random signs in one simulation."""
    memory: int = 20
    """Number of past steps that L-BFGS remembers."""
    frequencies: tuple[float, ...] = ()
    """Corners in Hz of the low-pass filters of the first stages. The last stage has no filter."""
    normalize: Literal["none", "shot", "trace"] = "none"
    """Norm that residuals are divided by before they are squared: of the shot or of the trace."""
    smoothing: float = 0.0
    """Standard deviation in cells of the Gaussian that smooths the updates of cells."""
    tikhonov: float = 0.0
    """Weight of the squared differences between neighbouring cells, in the loss."""
    total_variation: float = 0.0
    """Weight of the absolute differences between neighbouring cells, in the loss."""
    water: float = 0.0
    """Depth in m above which cells keep the start's values."""
    mask: pathlib.Path | None = None
    """File of an array with a value for each cell: cells with 0 keep the start's values."""
    bounds: tuple[str, ...] = ()
    """Bounds as vp=1400:5000. Default: half the start's smallest, 1.5 times its largest value."""
    box: bool = False
    """Keep the bounds of cells by L-BFGS-B, without smoothing. Default: by a sigmoid function."""
    source: Literal["explosive", "force_x", "force_y"] = "explosive"
    """Kind of the sources of elastic waves: pressure on all sides, or a force along x or y."""
    quality: tuple[float, ...] = ()
    """Quality factors Q of elastic P and S waves, or one for both. Default: no attenuation."""
    storage: Literal["auto", "all", "boundary"] | int = "auto"
    """Stored for gradients: all fields, the layers alone, or a state every so many steps."""
    storage_memory: int | None = None
    """Most bytes that a rank stores for gradients. Default: half of the free memory."""
    storage_precision: Literal["bfloat16", "float16"] | None = None
    """Precision of stored histories. Default: that of the waves."""
    storage_directory: pathlib.Path | None = None
    """Directory for files of histories or states, on a fast disk of each host. Default: memory."""
    seed: int = 0
    """Seed of the network's initial weights, the noise, and the draws of shots."""
    resume: bool = False
    """Continue from the saves of an earlier run with the same --out, if there are any."""
    overwrite: bool = False
    """Replace an earlier run with the same --out."""
    vtk: bool = False
    """Write the fields for ParaView, too: fields.pvti."""
    out: pathlib.Path = pathlib.Path("results/fwi")
    """Directory for the report, the pictures, the model and the saves."""

    def check(self) -> None:
        """Raise a ValueError for the first setting that is not valid."""
        super().check()
        if not self.invert:
            raise ValueError("--invert: expected at least one unknown field, got none.")
        if len(set(self.invert)) < len(self.invert) or not any(
            set(self.invert) <= set(names) for names in _SETS[self.physics]
        ):
            sets = " or of ".join(" ".join(names) for names in _SETS[self.physics])
            raise ValueError(
                f"--invert: for {self.physics} waves expected some of {sets}, got "
                f"{' '.join(self.invert)}."
            )
        if not (self.fineness > 0 and math.isfinite(self.fineness)):
            raise ValueError(f"--fineness: expected a positive number, got {self.fineness}.")
        if self.iterations < 1:
            raise ValueError(f"--iterations: expected at least 1, got {self.iterations}.")
        if self.rounds < 1:
            raise ValueError(f"--rounds: expected at least 1, got {self.rounds}.")
        if self.subset is not None and self.subset < 1:
            raise ValueError(f"--subset: expected at least 1, got {self.subset}.")
        if self.rounds > 1 and self.subset is None and not self.encode:
            raise ValueError(
                f"--rounds: expected --subset or --encode with it, got {self.rounds} rounds of all "
                "shots. Use --iterations."
            )
        if self.memory < 1:
            raise ValueError(f"--memory: expected at least 1, got {self.memory}.")
        for option in ("noise", "smoothing", "tikhonov", "total_variation", "water"):
            value = getattr(self, option)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"--{option.replace('_', '-')}: expected 0 or more, got {value}.")
        if any(not f > 0 for f in self.frequencies) or list(self.frequencies) != sorted(
            set(self.frequencies)
        ):
            raise ValueError(
                "--frequencies: expected positive and increasing values, got "
                f"{' '.join(map(str, self.frequencies))}."
            )
        check_quality(self.quality)
        self.bounds_by_field()
        if self.box and (self.unknown != "cells" or self.smoothing):
            raise ValueError(
                f"--box: expected --unknown cells and --smoothing 0, got {self.unknown} and "
                f"{self.smoothing}. Bounds of other parameters are not bounds of the field."
            )
        for option in ("initial", "data", "mask"):
            exists(f"--{option}", getattr(self, option))
        check_effects(
            self,
            (self.physics == "elastic", "--physics elastic", "source quality"),
            (self.unknown == "network", "--unknown network", "fineness"),
            (self.unknown == "cells", "--unknown cells", "smoothing"),
            (self.data is None, "no --data", "noise"),
        )

    def bounds_by_field(self) -> dict[str, tuple[float, float]]:
        """Return the given bounds by field."""
        bounds = {}
        for text in self.bounds:
            name, _, span = text.partition("=")
            low, _, high = span.partition(":")
            try:
                bounds[name] = float(low), float(high)
            except ValueError:
                raise ValueError(
                    f"--bounds: expected a text like vp=1400:5000, got {text}."
                ) from None
            if name not in self.invert:
                raise ValueError(
                    f"--bounds: {name} is not among the unknown fields. Add it to --invert."
                )
            if not 0 <= bounds[name][0] < bounds[name][1] < math.inf:
                raise ValueError(f"--bounds: expected 0 <= low < high, got {text}.")
        return bounds
