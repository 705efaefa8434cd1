"""Acoustic waves for the commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mpigrad.waves import Acoustic, Survey
from mpigrad.waves.acoustic import State
from mpigrad_apps.shots.experiment import Fields, p_velocity
from mpigrad_apps.shots.physics import Physics

__all__ = ["AcousticPhysics"]


@dataclasses.dataclass(frozen=True)
class AcousticPhysics(Physics):
    """Pressure in a model of vp."""

    components: ClassVar[tuple[str, ...]] = ("pressure",)
    unit: ClassVar[str] = "Pa"

    def model(self, steps: int) -> Acoustic:
        return Acoustic(self.grid, self.dt, steps, **self._options)

    @staticmethod
    def complete(fields: Fields, names: tuple[str, ...] = ()) -> Fields:
        return {"vp": p_velocity(fields)}

    def propagate(
        self,
        fields: Mapping[str, Float[Array, "*tile"]],
        wavelets: Float[Array, "some sources steps"],
        survey: Survey,
        state: Any = None,
    ) -> tuple[Float[Array, "shots components receivers steps"], Any]:
        velocity = fields["vp"].astype(self.kernels.precision)
        recording = self.model(wavelets.shape[-1]).propagate(velocity, wavelets, survey, state)
        return recording.gathers[:, None], recording.state

    def wavefields(self, state: State) -> dict[str, Float[Array, "*tile"]]:
        return {"pressure": state.field[0][self.tile.interior]}

    def limiting_velocity(self, fields: Mapping[str, Float[Array, "*tile"]]) -> Float[Array, ""]:
        return jnp.max(fields["vp"])

    def is_valid(self, fields: Mapping[str, Float[Array, "*tile"]]) -> Bool[Array, ""]:
        return jnp.all(fields["vp"].astype(self.kernels.precision) > 0)
