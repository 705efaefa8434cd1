"""The static data of a run of acoustic waves."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from mpigrad.waves.absorbing import WaveTile
from mpigrad.waves.acoustic.state import memory_size
from mpigrad.waves.history import History
from mpigrad.waves.interpolation import PointTable
from mpigrad.waves.native_run import AcousticSettings, Run, RunSettings, native_axes
from mpigrad.waves.run_agreement import common_settings, fingerprint
from mpigrad.waves.stability import wave_equation_limit
from mpigrad.waves.survey import Survey

__all__ = ["Scheme"]


@dataclasses.dataclass(frozen=True, eq=False)
class Scheme:
    """The discretisation of one survey on this rank.

    Attributes
    ----------
    absorbs
        The velocity and the reflection that the layers are made for.
    layers
        For each axis the damping of this rank's cells along it, in 1/s. On three axes the filter.
    sources
        Cells of the sources, shot after shot.
    receivers
        Cells of the receivers, shot after shot, or of one shot if all shots have the same ones.
    checkpoints
        As `checkpoint_code` encodes them.
    """

    tile: WaveTile
    dt: float
    steps: int
    order: int
    absorbs: tuple[float, float]
    layers: tuple[Any, ...]
    survey: Survey
    sources: PointTable
    receivers: PointTable
    checkpoints: int
    threads: int
    history: History

    @property
    def reach(self) -> int:
        """Number of cells that the stencil reaches."""
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
    def settings(self) -> dict[str, Any]:
        """Everything that must be the same on all ranks, by name."""
        common = common_settings(
            self.tile, self.dt, self.steps, self.survey, self.checkpoints, self.history
        )
        return common | {
            "order": self.order,
            "velocity and frequency of the layers": self.absorbs,
        }

    @functools.cached_property
    def fingerprint(self) -> int:
        """Hash of the settings."""
        return fingerprint(self.settings)

    @functools.cached_property
    def native(self) -> Run:
        """This scheme for the native library."""
        survey = self.survey
        receiver_shots = survey.receivers.shape[0]
        return Run(
            self.tile,
            RunSettings(
                reach=self.reach,
                steps=self.steps,
                shots=self.shots,
                threads=self.threads,
                checkpoints=self.checkpoints,
                history=self.history,
                fingerprint=self.fingerprint,
                dt=self.dt,
            ),
            AcousticSettings(stable_length=self.limit),
            profiles=tuple(np.asarray(self.layers[a]) for a in native_axes(self.tile.grid.ndim)),
            tables=(
                (self.shots, survey.n_sources, self.sources),
                (receiver_shots, survey.n_receivers, self.receivers),
            ),
            shapes=(self.tile.shape, self.tile.shape, (memory_size(self.tile),)),
            gathers=(self.shots, survey.n_receivers, self.steps),
        )
