"""All that a run of acoustic waves takes beside its fields: static, made once."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from mpigrad._shapes import Float
from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.acoustic.state import in_layers
from mpigrad.waves.interpolation import PointTable
from mpigrad.waves.native_run import ACOUSTIC, Run, default_memory
from mpigrad.waves.run_agreement import fingerprint
from mpigrad.waves.stability import wave_equation_limit
from mpigrad.waves.survey import Survey

__all__ = ["Scheme"]


@dataclasses.dataclass(frozen=True, eq=False)
class Scheme:
    """The discretisation of one survey on this rank.

    Attributes
    ----------
    absorbs
        The velocity that the layers are made for, and how much of it returns.
    sigma
        Damping along x (nx,) and along y (ny,), 1/s.
    sources
        The cells of all shots' sources, shot after shot.
    receivers
        The cells of the receivers, shot after shot, or of one shot where all have the same.
    """

    tile: WaveTile
    dt: float
    steps: int
    order: int
    absorbs: tuple[float, float]
    sigma: tuple[Float[np.ndarray, " nx"], Float[np.ndarray, " ny"]]
    survey: Survey
    sources: PointTable
    receivers: PointTable
    checkpoints: int  # as native_number has it
    threads: int
    memory: int | None

    @property
    def reach(self) -> int:
        """Cells that the stencil reaches."""
        return self.order // 2

    @property
    def shots(self) -> int:
        """Number of shots."""
        return self.survey.n_shots

    @property
    def limit(self) -> float:
        """The largest stable time step times the largest velocity."""
        return wave_equation_limit(self.tile.grid, self.order)

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number of what all ranks must have alike."""
        grid = self.tile.grid
        common = (grid.shape, grid.spacing, grid.dims, self.tile.pml, self.dt, self.steps)
        own = (self.order, self.absorbs, self.checkpoints, self.survey.digest())
        return fingerprint((common, own))

    @functools.cached_property
    def native(self) -> Run:
        """This scheme as the native library takes it."""
        survey = self.survey
        receiver_shots = survey.receivers.shape[0]
        return Run(
            ACOUSTIC,
            self.tile,
            reach=self.reach,
            settings=(
                self.steps,
                self.shots,
                self.threads,
                self.checkpoints,
                default_memory() if self.memory is None else self.memory,
            ),
            fingerprint=self.fingerprint,
            reals=(self.dt, self.limit),
            profiles=self.sigma,
            tables=(
                (self.shots, survey.n_sources, self.sources),
                (receiver_shots, survey.n_receivers, self.receivers),
            ),
            shapes=(self.tile.shape, self.tile.shape, (2 * int(in_layers(self.tile).sum()),)),
            gathers=(self.shots, survey.n_receivers, self.steps),
        )
