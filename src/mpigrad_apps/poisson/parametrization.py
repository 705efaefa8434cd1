"""Representations of kappa by parameters that every rank holds."""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mpigrad.collective_errors import call_on_root
from mpigrad.grid import Grid
from mpigrad.runtime import write_atomically
from mpigrad_apps.poisson.network import Network, load_network, save_network

__all__ = ["CellValues", "NetworkValues", "Parametrization"]


@dataclasses.dataclass(frozen=True)
class Parametrization(abc.ABC):
    """A positive field kappa on a grid, as a function of parameters that are equal on all ranks."""

    grid: Grid
    file_name = ""

    @abc.abstractmethod
    def first(self, constant: float | None, seed: int) -> Any:
        """Return the parameters to start from.

        `constant` is the constant kappa that fits the observations best, or None for the start of
        the ADCME paper.
        """

    @abc.abstractmethod
    def kappa(self, parameters: Any) -> Float[Array, "lx ly"]:
        """Compute this rank's tile of kappa, shape (lx, ly). It is differentiable."""

    @abc.abstractmethod
    def save(self, path: pathlib.Path, parameters: Any) -> None:
        """Write the parameters to a file that is complete at any time. Call it on one rank."""

    @abc.abstractmethod
    def load(self, path: pathlib.Path) -> Any:
        """Read parameters from a file on rank 0 (collective). All ranks raise its errors."""


@dataclasses.dataclass(frozen=True)
class NetworkValues(Parametrization):
    """A kappa that a `Network` computes at the centres of the cells."""

    file_name = "network.eqx"

    def first(self, constant: float | None, seed: int) -> Network:
        scale = (
            1.0 if constant is None else constant / 5
        )  # the untrained network has values around 5
        return Network(jax.random.key(seed), scale=scale)

    def kappa(self, parameters: Network) -> Float[Array, "lx ly"]:
        x, y = self.grid.centers()
        return parameters(jnp.asarray(x), jnp.asarray(y))

    def save(self, path: pathlib.Path, parameters: Network) -> None:
        save_network(path, parameters)

    def load(self, path: pathlib.Path) -> Network:
        return call_on_root(self.grid.comm, lambda: load_network(path))


@dataclasses.dataclass(frozen=True)
class CellValues(Parametrization):
    """A kappa = exp(theta) with one theta for each cell of the grid.

    Every rank holds all of theta, shape (nx, ny), and uses its tile. The gradient is summed over
    ranks. So the inner products of the optimizer are equal for any number of ranks. The price is
    memory and messages of the size of the grid.
    """

    file_name = "cells.npy"

    def first(self, constant: float | None, seed: int) -> Float[Array, "nx ny"]:
        return jnp.full(self.grid.shape, np.log(1.0 if constant is None else constant))

    def kappa(self, parameters: Float[Array, "nx ny"]) -> Float[Array, "lx ly"]:
        return jnp.exp(parameters[self.grid.slices])

    def save(self, path: pathlib.Path, parameters: Float[Array, "nx ny"]) -> None:
        write_atomically(path, lambda file: np.save(file, np.exp(parameters)))

    def load(self, path: pathlib.Path) -> Float[Array, "nx ny"]:
        return jnp.log(jnp.asarray(call_on_root(self.grid.comm, lambda: self._read(path))))

    def _read(self, path: pathlib.Path) -> Float[np.ndarray, "nx ny"]:
        try:
            kappa = np.load(path, allow_pickle=False)
            if not isinstance(kappa, np.ndarray):
                with kappa:
                    raise TypeError(f"expected one array, got the arrays {', '.join(kappa)}")
            if kappa.dtype.kind not in "iuf":
                raise TypeError(f"expected real numbers, got {kappa.dtype}")
            kappa = kappa.astype(float)
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as an .npy file: {error}. Write it with numpy.save."
            ) from error
        if kappa.shape != self.grid.shape:
            raise ValueError(
                f"{path}: kappa must have the shape of the grid, {self.grid.shape}, got "
                f"{kappa.shape}."
            )
        if not np.all((kappa > 0) & np.isfinite(kappa)):
            bad = int(np.sum(~((kappa > 0) & np.isfinite(kappa))))
            raise ValueError(
                f"{path}: kappa must be positive and finite in every cell, but {bad} of "
                f"{kappa.size} values are not."
            )
        return kappa
