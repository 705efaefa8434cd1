"""The interface of a wave equation to commands and inversions."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Array, Bool, Float

from mpigrad.grid import Grid
from mpigrad.waves import Survey, WaveTile
from mpigrad_apps.shots.experiment import Fields
from mpigrad_apps.shots.options import KernelOptions

__all__ = ["Physics"]


@dataclasses.dataclass(frozen=True)
class Physics(abc.ABC):
    """Waves in a model of named fields, on one grid and with one time step.

    Attributes
    ----------
    grid
        The grid of the model, divided among the ranks of a group.
    dt
        Time step in s.
    kernels
        Layers, precision and backend of the kernels.
    """

    components: ClassVar[tuple[str, ...]]
    """Names of the components that a receiver records."""
    unit: ClassVar[str]
    """Unit of the components, for wavelets in SI units."""

    grid: Grid
    dt: float
    kernels: KernelOptions

    @property
    def tile(self) -> WaveTile:
        """This rank's tile with its absorbing layers."""
        return WaveTile(self.grid, self.kernels.pml)

    @property
    @abc.abstractmethod
    def reach(self) -> int:
        """Number of cells that the stencil reaches into a neighbouring tile."""

    @property
    @abc.abstractmethod
    def max_stable_velocity(self) -> float:
        """The largest velocity for which the time step is stable, in m/s."""

    @staticmethod
    @abc.abstractmethod
    def complete(fields: Fields, names: tuple[str, ...] = ()) -> Fields:
        """Return the whole fields of the equation, including `names`, from the fields of a file."""

    @abc.abstractmethod
    def propagate(
        self,
        fields: Mapping[str, Float[Array, "*tile"]],
        wavelets: Float[Array, "some sources steps"],
        survey: Survey,
        state: Any = None,
    ) -> tuple[Float[Array, "shots components receivers steps"], Any]:
        """Return the gathers, complete on every rank, and the state after the last step.

        Differentiable. It does as many steps as the wavelets have samples. `fields` are this rank's
        tiles.
        """

    @abc.abstractmethod
    def wavefields(self, state: Any) -> dict[str, Float[Array, "*tile"]]:
        """Return this rank's tiles of the first shot's fields that snapshots show."""

    @abc.abstractmethod
    def limiting_velocity(self, fields: Mapping[str, Float[Array, "*tile"]]) -> Float[Array, ""]:
        """Return the velocity of this rank's tiles that limits the time step, m/s (collective)."""

    @abc.abstractmethod
    def is_valid(self, fields: Mapping[str, Float[Array, "*tile"]]) -> Bool[Array, ""]:
        """Return whether this rank's tiles are a valid material in the precision of the waves."""
