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
from mpigrad.waves import Elastic, ElasticMedium, Survey, lame
from mpigrad.waves.arguments import limiting_square, staggered_limit
from mpigrad.waves.elastic import State
from mpigrad.waves.elastic.scheme import REACH
from mpigrad_apps.shots.experiment import Fields
from mpigrad_apps.shots.physics import Physics

__all__ = ["ElasticPhysics"]

# m/s. If a file lacks S velocities, slower cells are water, without S waves.
_WATER = 1510.0


@dataclasses.dataclass(frozen=True)
class ElasticPhysics(Physics):
    """Velocities in a model of lambda, mu and rho, or of vp, vs and rho."""

    components: ClassVar[tuple[str, ...]] = ("vx", "vy")
    unit: ClassVar[str] = "m/s"

    frequency: float
    source: Literal["explosive", "force_x", "force_y"] = "explosive"

    @property
    def reach(self) -> int:
        return REACH

    @property
    def max_stable_velocity(self) -> float:
        return staggered_limit(self.grid) / self.dt

    @staticmethod
    def complete(fields: Fields, names: tuple[str, ...] = ()) -> Fields:
        """Return lambda, mu and rho if lambda or mu is among `names`, else vp, vs and rho.

        A file without a density gets Gardner's, 310 vp^(1/4) (Gardner et al. 1974). A file without
        S velocities gets vp / sqrt(3), and 0 in water.
        """
        given = dict(fields)
        if "vp" in given:
            given.setdefault("rho", 310 * given["vp"] ** 0.25)
            given.setdefault("vs", np.where(given["vp"] > _WATER, given["vp"] / 3**0.5, 0.0))
        missing = {"vp", "vs", "rho"} - given.keys()
        if missing and not {"lambda", "mu", "rho"} <= given.keys():
            raise ValueError(
                "--model: elastic waves need vp, or lambda, mu and rho, and the model has "
                f"{', '.join(fields)}. Add the missing fields to the file."
            )
        if {"lambda", "mu"} & set(names):
            if not {"lambda", "mu"} <= given.keys():
                lam, mu = lame(given["vp"], given["vs"], given["rho"])
                given |= {"lambda": np.asarray(lam), "mu": np.asarray(mu)}
            return {name: given[name] for name in ("lambda", "mu", "rho")}
        if missing:
            lam, mu, rho = (given[name] for name in ("lambda", "mu", "rho"))
            given |= {"vp": np.sqrt((lam + 2 * mu) / rho), "vs": np.sqrt(mu / rho)}
        return {name: given[name] for name in ("vp", "vs", "rho")}

    def propagate(
        self,
        fields: Mapping[str, Float[Array, "lx ly"]],
        wavelets: Float[Array, "some sources steps"],
        survey: Survey,
        state: Any = None,
    ) -> tuple[Float[Array, "shots components receivers steps"], Any]:
        model = Elastic(
            self.grid,
            self.dt,
            wavelets.shape[-1],
            self.frequency,
            pml=self.kernels.pml,
            source=self.source,
            components=("vx", "vy"),
            threads=self.kernels.threads,
            backend=self.kernels.backend,
        )
        medium = ElasticMedium(*self._rounded(fields))
        recording = model.propagate(medium, wavelets, survey, state)
        return recording.gathers, recording.state

    def wavefields(self, state: State) -> dict[str, Float[Array, "lx ly"]]:
        interior = self.tile.interior
        return {"vy": state.vy[0][interior], "vx": state.vx[0][interior]}

    def limiting_velocity(self, fields: Mapping[str, Float[Array, "lx ly"]]) -> Float[Array, ""]:
        lam, mu, rho = _moduli(fields)
        stiffness = lam + 2 * mu
        largest = jnp.stack([jnp.max(x) for x in (stiffness / rho, -rho, stiffness)])
        square, density, stiffest = allreduce(largest, op=MPI.MAX, comm=self.grid.comm)
        return jnp.sqrt(limiting_square(square, -density, stiffest))

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
