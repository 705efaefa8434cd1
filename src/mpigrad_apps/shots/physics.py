"""The interface of a wave equation to commands and inversions."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Array, Bool, Float

from mpigrad.grid import Grid
from mpigrad.waves import Acoustic, Elastic, Storage, Survey, WaveTile
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
    storage
        What a run stores for its gradient.
    """

    components: ClassVar[tuple[str, ...]]
    """Names of the components that a receiver records."""
    unit: ClassVar[str]
    """Unit of the components, for wavelets in SI units."""

    grid: Grid
    dt: float
    kernels: KernelOptions
    storage: Storage = dataclasses.field(default=Storage(), kw_only=True)

    @abc.abstractmethod
    def model(self, steps: int) -> Acoustic | Elastic:
        """Return the propagator of this many steps.

        Raises
        ------
        ValueError
            If a setting is not valid, or a tile has fewer cells than the stencil reaches.
        """

    @property
    def tile(self) -> WaveTile:
        """This rank's tile with its absorbing layers."""
        return self.model(1).tile

    @property
    def max_stable_velocity(self) -> float:
        """The largest velocity for which the time step is stable, in m/s."""
        return self.model(1).stable_length / self.dt

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the waves depend on, without the grid and the time step."""
        kernels = self.kernels
        return {
            "physics": type(self).__name__,
            "pml": kernels.pml,
            "free surface": kernels.free_surface,
            "precision": kernels.precision,
            "order": kernels.order,
        }

    @property
    def _options(self) -> dict[str, Any]:
        """The arguments that all propagators have."""
        kernels = self.kernels
        return {
            "pml": kernels.pml,
            "threads": kernels.threads,
            "backend": kernels.backend,
            "order": kernels.order,
            "storage": self.storage,
            # The last axis points downwards.
            "free_surface": f"{'xyz'[self.grid.ndim - 1]}0" if kernels.free_surface else None,
        }

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
