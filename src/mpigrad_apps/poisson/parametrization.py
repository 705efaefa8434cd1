"""What stands for kappa: parameters that every rank holds, and this rank's tile made of them."""

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
from mpigrad_apps.atomic_write import write_atomically
from mpigrad_apps.poisson.network import Network, load_network, save_network

__all__ = ["CellValues", "NetworkValues", "Parametrization"]


@dataclasses.dataclass(frozen=True)
class Parametrization(abc.ABC):
    """A positive field kappa on a grid, as a function of parameters equal on all ranks."""

    grid: Grid
    file_name = ""

    @abc.abstractmethod
    def first(self, constant: float | None, seed: int) -> Any:
        """The parameters that the estimation starts from.

        `constant` is the kappa that, constant, fits the observations best; None for the setting
        of the ADCME paper.
        """

    @abc.abstractmethod
    def kappa(self, parameters: Any) -> Float[Array, "lx ly"]:
        """Tile of kappa on this rank, of shape (lx, ly); differentiable."""

    @abc.abstractmethod
    def save(self, path: pathlib.Path, parameters: Any) -> None:
        """Write the parameters to a file which is whole at any time (on one rank)."""

    @abc.abstractmethod
    def load(self, path: pathlib.Path) -> Any:
        """The parameters of a file, read by rank 0; its error is raised on every rank."""


@dataclasses.dataclass(frozen=True)
class NetworkValues(Parametrization):
    """kappa from a `Network` of the cells' centres."""

    file_name = "network.eqx"

    def first(self, constant: float | None, seed: int) -> Network:
        scale = 1.0 if constant is None else constant / 5  # the untrained network is around 5
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
    """kappa = exp(theta), one theta for each cell of the grid.

    Every rank holds all of theta, of shape (nx, ny), and takes its tile; the gradient is summed
    over ranks. So the optimizer's inner products are those of the whole vector, whatever the
    number of ranks, at the price of memory and of messages of the size of the grid.
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
            kappa = np.asarray(np.load(path, allow_pickle=False), float)
        except Exception as error:
            raise ValueError(f"{path} cannot be read as an .npy file: {error}") from error
        if kappa.shape != self.grid.shape:
            raise ValueError(
                f"{path}: kappa has shape {kappa.shape}, the grid has {self.grid.shape} cells"
            )
        if not np.all((kappa > 0) & np.isfinite(kappa)):
            raise ValueError(f"{path}: kappa must be positive and finite in every cell")
        return kappa
