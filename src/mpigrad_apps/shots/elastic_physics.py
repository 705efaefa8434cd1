"""Elastic waves for the commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from mpi4py import MPI

from mpigrad.operations import allreduce
from mpigrad.waves import Elastic, ElasticMedium, Relaxation, Survey, fit_relaxation, lame
from mpigrad.waves.arguments import limiting_square
from mpigrad.waves.elastic import AnelasticState, State
from mpigrad_apps.shots.experiment import Fields
from mpigrad_apps.shots.physics import Physics

__all__ = ["ElasticPhysics"]

# m/s. If a file lacks S velocities, slower cells are water, without S waves.
_WATER = 1510.0
# Attenuation is fitted to the frequencies from the wavelet's peak over this to the peak times it.
_BAND = 3.0


@dataclasses.dataclass(frozen=True)
class ElasticPhysics(Physics):
    """Velocities in a model of lambda, mu and rho, or of vp, vs and rho."""

    components: ClassVar[tuple[str, ...]] = ("vx", "vy")
    unit: ClassVar[str] = "m/s"

    frequency: float
    source: Literal["explosive", "force_x", "force_y"] = "explosive"
    quality: tuple[float, ...] = ()

    def model(self, steps: int) -> Elastic:
        return Elastic(
            self.grid,
            self.dt,
            steps,
            self.frequency,
            source=self.source,
            components=("vx", "vy"),
            relaxation=self._relaxation,
            reference=self.frequency if self.quality else None,
            **self._options,
        )

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"source": self.source, "quality": self.quality}

    @property
    def max_stable_velocity(self) -> float:
        """The largest velocity at the wavelet's peak for which the time step is stable, in m/s."""
        stable, relaxation = super().max_stable_velocity, self._relaxation
        if relaxation is None:
            return stable
        # Waves of high frequencies are faster than those of the peak, and limit the step.
        return stable / relaxation.unrelaxed_square(self.quality[0], self.frequency) ** 0.5

    @property
    def _relaxation(self) -> Relaxation | None:
        """The mechanisms of the quality factors, over the wavelet's band."""
        if not self.quality:
            return None
        band = self.frequency / _BAND, self.frequency * _BAND
        return fit_relaxation(min(self.quality), band)

    @staticmethod
    def complete(fields: Fields, names: tuple[str, ...] = ()) -> Fields:
        """Return lambda, mu and rho if lambda or mu is among `names`, else vp, vs and rho.

        A file without a density gets Gardner's, 310 vp^(1/4) (Gardner et al. 1974). A file without
        S velocities gets vp / sqrt(3), and 0 in water.
        """
        arrays = dict(fields)
        if "vp" in arrays:
            arrays.setdefault("rho", 310 * arrays["vp"] ** 0.25)
            arrays.setdefault("vs", np.where(arrays["vp"] > _WATER, arrays["vp"] / 3**0.5, 0.0))
        missing = {"vp", "vs", "rho"} - arrays.keys()
        if missing and not {"lambda", "mu", "rho"} <= arrays.keys():
            raise ValueError(
                "--model: elastic waves need vp, or lambda, mu and rho, and the model has "
                f"{', '.join(fields)}. Add the missing fields to the file."
            )
        if {"lambda", "mu"} & set(names):
            if not {"lambda", "mu"} <= arrays.keys():
                lam, mu = lame(arrays["vp"], arrays["vs"], arrays["rho"])
                arrays |= {"lambda": np.asarray(lam), "mu": np.asarray(mu)}
            return {name: arrays[name] for name in ("lambda", "mu", "rho")}
        if missing:
            lam, mu, rho = (arrays[name] for name in ("lambda", "mu", "rho"))
            arrays |= {"vp": np.sqrt((lam + 2 * mu) / rho), "vs": np.sqrt(mu / rho)}
        return {name: arrays[name] for name in ("vp", "vs", "rho")}

    def propagate(
        self,
        fields: Mapping[str, Float[Array, "lx ly"]],
        wavelets: Float[Array, "some sources steps"],
        survey: Survey,
        state: Any = None,
    ) -> tuple[Float[Array, "shots components receivers steps"], Any]:
        lam, mu, rho = self._rounded(fields)
        factors = [jnp.full_like(lam, q) for q in self.quality]
        medium = ElasticMedium(lam, mu, rho, *(factors * 2)[:2])
        recording = self.model(wavelets.shape[-1]).propagate(medium, wavelets, survey, state)
        return recording.gathers, recording.state

    def wavefields(self, state: State | AnelasticState) -> dict[str, Float[Array, "lx ly"]]:
        interior = self.tile.interior
        fields: Any = state.elastic if isinstance(state, AnelasticState) else state
        return {"vy": fields.vy[0][interior], "vx": fields.vx[0][interior]}

    def limiting_velocity(self, fields: Mapping[str, Float[Array, "lx ly"]]) -> Float[Array, ""]:
        lam, mu, rho = _moduli(fields)
        stiffness = lam + 2 * mu
        largest = jnp.stack([jnp.max(x) for x in (stiffness / rho, -rho, stiffness)])
        square, density, stiffest = allreduce(largest, op=MPI.MAX, comm=self.grid.comm)
        order, surface = self.kernels.order, self.kernels.free_surface
        return jnp.sqrt(limiting_square(order, surface, square, -density, stiffest))

    def is_valid(self, fields: Mapping[str, Float[Array, "lx ly"]]) -> Bool[Array, ""]:
        lam, mu, rho = self._rounded(fields)
        return jnp.all((lam + mu > 0) & (mu >= 0) & (rho > 0))

    def _rounded(
        self, fields: Mapping[str, Float[Array, "lx ly"]]
    ) -> tuple[Float[Array, "lx ly"], ...]:
        """Return lambda, mu and rho in the precision of the waves."""
        return tuple(field.astype(self.kernels.precision) for field in _moduli(fields))


def _moduli(
    fields: Mapping[str, Float[Array, "lx ly"]],
) -> tuple[Float[Array, "lx ly"], Float[Array, "lx ly"], Float[Array, "lx ly"]]:
    """Return lambda, mu and rho."""
    if "lambda" in fields:
        return fields["lambda"], fields["mu"], fields["rho"]
    lam, mu = lame(fields["vp"], fields["vs"], fields["rho"])
    return jnp.asarray(lam), jnp.asarray(mu), fields["rho"]
