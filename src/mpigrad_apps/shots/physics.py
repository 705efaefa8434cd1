"""What commands and inversions need to know of an equation."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Array, Bool, Float

from mpigrad.waves.survey import Survey
from mpigrad_apps.shots.experiment import Fields

__all__ = ["Physics"]


class Physics(abc.ABC):
    """Waves in a model given by named fields, on one grid, with one time step."""

    components: ClassVar[tuple[str, ...]]
    """What a receiver records."""

    @staticmethod
    @abc.abstractmethod
    def complete(fields: Fields, names: tuple[str, ...] = ()) -> Fields:
        """The whole fields that the equation needs, `names` among them, from a file's fields."""

    @abc.abstractmethod
    def propagate(
        self,
        fields: Mapping[str, Float[Array, "lx ly"]],
        wavelets: Float[Array, "some sources steps"],
        survey: Survey,
        state: Any = None,
    ) -> tuple[Float[Array, "shots components receivers steps"], Any]:
        """Gathers, complete on every rank, and the state after the last step; differentiable.

        Takes as many steps as the wavelets have. `fields` are this rank's tiles.
        """

    @abc.abstractmethod
    def wavefields(self, state: Any) -> dict[str, Float[Array, "lx ly"]]:
        """This rank's tiles of the first shot's fields that are worth to be shown."""

    @abc.abstractmethod
    def fastest(self) -> float:
        """The largest velocity in m/s for which the time step is stable (collective)."""

    @abc.abstractmethod
    def limiting_velocity(self, fields: Mapping[str, Float[Array, "lx ly"]]) -> Float[Array, ""]:
        """The velocity in m/s of this rank's tiles that limits the time step (collective)."""

    @abc.abstractmethod
    def sound(self, fields: Mapping[str, Float[Array, "lx ly"]]) -> Bool[Array, ""]:
        """Whether this rank's tiles are of a possible material, in the precision of the waves."""
