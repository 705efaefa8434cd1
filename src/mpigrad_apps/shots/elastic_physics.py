"""Elastic waves, as the commands see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from mpi4py import MPI

from mpigrad.grid import Grid
from mpigrad.operations import allreduce
from mpigrad.waves.elastic.media import lame
from mpigrad.waves.elastic.model import Elastic
from mpigrad.waves.elastic.state import State
from mpigrad.waves.stability import limiting_square
from mpigrad.waves.survey import Survey
from mpigrad_apps.shots.experiment import Fields
from mpigrad_apps.shots.options import WaveOptions
from mpigrad_apps.shots.physics import Physics

__all__ = ["ElasticPhysics"]

_WATER = 1510.0  # m/s: what is not faster has no S waves, where the file has none


@dataclasses.dataclass(frozen=True)
class ElasticPhysics(Physics):
    """Velocities in a model of lambda, mu and rho, or of vp, vs and rho."""

    components: ClassVar[tuple[str, ...]] = ("vx", "vy")

    grid: Grid
    dt: float
    options: WaveOptions
    frequency: float
    source: Literal["explosive", "force_x", "force_y"] = "explosive"

    @staticmethod
    def complete(fields: Fields, names: tuple[str, ...] = ()) -> Fields:
        """Lambda, mu and rho where one of the first two is among `names`, else vp, vs and rho.

        A file without a density gets Gardner's, 310 vp^(1/4) (Gardner et al. 1974); one without
        velocities of S waves gets vp / sqrt(3), and 0 in water.
        """
        found = dict(fields)
        if "vp" in found:
            found.setdefault("rho", 310 * found["vp"] ** 0.25)
            found.setdefault("vs", np.where(found["vp"] > _WATER, found["vp"] / 3**0.5, 0.0))
        missing = {"vp", "vs", "rho"} - found.keys()
        if missing and not {"lambda", "mu", "rho"} <= found.keys():
            raise ValueError(
                f"elastic waves need vp, or lambda, mu and rho; the model has {', '.join(fields)}"
            )
        if {"lambda", "mu"} & set(names):
            if not {"lambda", "mu"} <= found.keys():
                lam, mu = lame(found["vp"], found["vs"], found["rho"])
                found |= {"lambda": np.asarray(lam), "mu": np.asarray(mu)}
            return {name: found[name] for name in ("lambda", "mu", "rho")}
        if missing:
            lam, mu, rho = (found[name] for name in ("lambda", "mu", "rho"))
            found |= {"vp": np.sqrt((lam + 2 * mu) / rho), "vs": np.sqrt(mu / rho)}
        return {name: found[name] for name in ("vp", "vs", "rho")}

    def propagate(
        self,
        fields: Mapping[str, Float[Array, "lx ly"]],
        wavelets: Float[Array, "some sources steps"],
        survey: Survey,
        state: Any = None,
    ) -> tuple[Float[Array, "shots components receivers steps"], Any]:
        lam, mu, rho = self._rounded(fields)
        model = self._model(wavelets.shape[-1])
        recording = model.propagate(lam, mu, rho, wavelets, survey, state)
        return recording.gathers, recording.state

    def wavefields(self, state: State) -> dict[str, Float[Array, "lx ly"]]:
        interior = self._model(1).tile.interior
        return {"vy": state.vy[0][interior], "vx": state.vx[0][interior]}

    def fastest(self) -> float:
        unit = jnp.ones(self.grid.local_shape)
        return self._model(1).largest_time_step(unit, 0 * unit, unit) / self.dt

    def limiting_velocity(self, fields: Mapping[str, Float[Array, "lx ly"]]) -> Float[Array, ""]:
        lam, mu, rho = _moduli(fields)
        stiffness = lam + 2 * mu
        mine = jnp.stack([jnp.max(x) for x in (stiffness / rho, -rho, stiffness)])
        square, density, stiffest = allreduce(mine, op=MPI.MAX, comm=self.grid.comm)
        return jnp.sqrt(limiting_square(square, -density, stiffest))

    def sound(self, fields: Mapping[str, Float[Array, "lx ly"]]) -> Bool[Array, ""]:
        lam, mu, rho = self._rounded(fields)
        return jnp.all((lam + mu > 0) & (mu >= 0) & (rho > 0))

    def _rounded(
        self, fields: Mapping[str, Float[Array, "lx ly"]]
    ) -> tuple[Float[Array, "lx ly"], ...]:
        """Lambda, mu and rho in the precision of the waves."""
        return tuple(field.astype(self.options.precision) for field in _moduli(fields))

    def _model(self, steps: int) -> Elastic:
        return Elastic(
            self.grid,
            self.dt,
            steps,
            self.frequency,
            pml=self.options.pml,
            source=self.source,
            components=("vx", "vy"),
            threads=self.options.threads,
            method=self.options.method,
        )


def _moduli(
    fields: Mapping[str, Float[Array, "lx ly"]],
) -> tuple[Float[Array, "lx ly"], Float[Array, "lx ly"], Float[Array, "lx ly"]]:
    """Lambda, mu and rho."""
    if "lambda" in fields:
        return fields["lambda"], fields["mu"], fields["rho"]
    lam, mu = lame(fields["vp"], fields["vs"], fields["rho"])
    return jnp.asarray(lam), jnp.asarray(mu), fields["rho"]
