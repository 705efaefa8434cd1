"""Acoustic waves, as the commands see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mpigrad.grid import Grid
from mpigrad.waves.acoustic.model import Acoustic
from mpigrad.waves.acoustic.state import State
from mpigrad.waves.survey import Survey
from mpigrad_apps.shots.experiment import Fields, p_velocity
from mpigrad_apps.shots.options import WaveOptions
from mpigrad_apps.shots.physics import Physics

__all__ = ["AcousticPhysics"]


@dataclasses.dataclass(frozen=True)
class AcousticPhysics(Physics):
    """Pressure in a model of vp."""

    components: ClassVar[tuple[str, ...]] = ("pressure",)

    grid: Grid
    dt: float
    options: WaveOptions
    order: Literal[2, 4] = 4

    @staticmethod
    def complete(fields: Fields, names: tuple[str, ...] = ()) -> Fields:
        return {"vp": p_velocity(fields)}

    def propagate(
        self,
        fields: Mapping[str, Float[Array, "lx ly"]],
        wavelets: Float[Array, "some sources steps"],
        survey: Survey,
        state: Any = None,
    ) -> tuple[Float[Array, "shots components receivers steps"], Any]:
        velocity = fields["vp"].astype(self.options.precision)
        recording = self._model(wavelets.shape[-1]).propagate(velocity, wavelets, survey, state)
        return recording.gathers[:, None], recording.state

    def wavefields(self, state: State) -> dict[str, Float[Array, "lx ly"]]:
        return {"pressure": state.field[0][self._model(1).tile.interior]}

    def fastest(self) -> float:
        unit = jnp.ones(self.grid.local_shape)
        return self._model(1).largest_time_step(unit) / self.dt

    def limiting_velocity(self, fields: Mapping[str, Float[Array, "lx ly"]]) -> Float[Array, ""]:
        return jnp.max(fields["vp"])

    def sound(self, fields: Mapping[str, Float[Array, "lx ly"]]) -> Bool[Array, ""]:
        return jnp.all(fields["vp"].astype(self.options.precision) > 0)

    def _model(self, steps: int) -> Acoustic:
        return Acoustic(
            self.grid,
            self.dt,
            steps,
            order=self.order,
            pml=self.options.pml,
            threads=self.options.threads,
            method=self.options.method,
        )
