"""How the cells of a model, and the parameters of an inversion, lie on the ranks."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped
from mpi4py import MPI

from mpigrad.grid import Grid
from mpigrad.sparse import GhostExchange
from mpigrad_apps.fwi.regularization import window_with_neighbors

__all__ = ["Layout", "TileLayout", "WholeLayout", "Window", "relative", "wider"]

Window = tuple[slice, ...]
Reduction = Literal["min", "max", "mean"]


class Layout(abc.ABC):
    """The cells that a rank holds of each field, and those whose parameters it has.

    Attributes
    ----------
    shape
        Number of cells of the whole model along each axis.
    held
        The cells of the arrays of a field on this rank, as slices of the whole.
    read_cells
        The cells whose parameters `read` returns.
    sharded
        The grid that divides the parameters among all ranks, None if every rank has all of them.
    """

    shape: tuple[int, ...]
    held: Window
    read_cells: Window
    sharded: Grid | None

    @property
    def divided(self) -> bool:
        """True if no rank holds the whole model."""
        return self.sharded is not None

    def part(self, field: Any, window: Window) -> Any:
        """Return a window of the whole from an array whose last axes are the held cells."""
        return field[(..., *relative(window, self.held, self.shape))]

    @property
    @abc.abstractmethod
    def local_shape(self) -> tuple[int, ...]:
        """Number of cells along each axis whose parameters this rank has."""

    @abc.abstractmethod
    def read(self, parameters: Float[Array, "k ..."]) -> Float[Array, "k ..."]:
        """Return the parameters of `read_cells`. Differentiable (collective)."""

    @abc.abstractmethod
    def collect(self, values: Float[Array | np.ndarray, "k ..."]) -> Float[Array, "k ..."]:
        """Return values of held cells in the cells whose parameters this rank has (collective)."""

    @abc.abstractmethod
    def add_to(self, digest: Any, field: Shaped[np.ndarray, "*held"]) -> None:
        """Update a hash with the whole of a field. The same on all ranks (collective)."""

    @abc.abstractmethod
    def reduce(self, field: Shaped[np.ndarray, "*held"], how: Reduction) -> float:
        """Return the smallest, largest or mean value of a whole field (collective)."""


class WholeLayout(Layout):
    """Every rank holds all cells and all parameters."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.held = self.read_cells = tuple(slice(0, n) for n in shape)
        self.sharded = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.shape

    def read(self, parameters: Float[Array, "k ..."]) -> Float[Array, "k ..."]:
        return parameters

    def collect(self, values: Float[Array | np.ndarray, "k ..."]) -> Float[Array, "k ..."]:
        return jnp.asarray(values)

    def add_to(self, digest: Any, field: Shaped[np.ndarray, "*held"]) -> None:
        digest.update(np.ascontiguousarray(field).tobytes())

    def reduce(self, field: Shaped[np.ndarray, "*held"], how: Reduction) -> float:
        return float(getattr(field, how)())


class TileLayout(Layout):
    """No rank holds the whole model, and every parameter is on one rank.

    The fields are divided among the ranks of a group. A rank holds its tile and the next cell along
    each axis. The parameters are divided among all ranks. Each rank reads those of its group's tile
    from their owners, and the adjoint adds the gradients of all groups.

    Parameters
    ----------
    grid
        The grid of this rank's group.
    parameters
        A grid of the same cells over all ranks.
    margin
        Number of cells around the held ones whose parameters are read, for smoothing.
    first
        Whether this is the first group. Its ranks answer for the values of their tiles.
    """

    def __init__(self, grid: Grid, parameters: Grid, margin: int, first: bool) -> None:
        self.shape, self.sharded = grid.shape, parameters
        self._grid, self._first = grid, first
        self.held = window_with_neighbors(grid)
        self.read_cells = wider(self.held, self.shape, margin)

    @property
    def local_shape(self) -> tuple[int, ...]:
        assert self.sharded is not None
        return self.sharded.local_shape

    @functools.cached_property
    def _exchange(self) -> GhostExchange:
        return self._exchange_of(self.read_cells)

    @functools.cached_property
    def _tile_exchange(self) -> GhostExchange:
        return self._exchange_of(self._grid.slices)

    def prepare(self) -> None:
        """Make the exchanges of messages, outside of compiled programs (collective)."""
        assert self._exchange and self._tile_exchange

    def _exchange_of(self, window: Window) -> GhostExchange:
        cells = np.ix_(*(np.arange(part.start, part.stop) for part in window))
        assert self.sharded is not None
        rows = self.sharded.rows(*cells).ravel()
        return GhostExchange(self.sharded.n_local, rows, self.sharded.comm)

    def read(self, parameters: Float[Array, "k ..."]) -> Float[Array, "k ..."]:
        rows = parameters.reshape(len(parameters), -1).T
        values = self._exchange.exchange(rows)
        shape = tuple(part.stop - part.start for part in self.read_cells)
        return values.T.reshape(len(parameters), *shape)

    def collect(self, values: Float[Array | np.ndarray, "k ..."]) -> Float[Array, "k ..."]:
        exchange = self._tile_exchange
        tile = self.part(values, self._grid.slices).reshape(len(values), -1).T
        tile = tile if self._first else jnp.zeros_like(tile)
        size = exchange.n_local + len(exchange.ghosts)
        rows = jnp.zeros((size, len(values)), tile.dtype).at[exchange.position].set(tile)
        return exchange.accumulate(rows).T.reshape(len(values), *self.local_shape)

    def add_to(self, digest: Any, field: Shaped[np.ndarray, "*held"]) -> None:
        """Update a hash with the sum of a number for each cell, which does not depend on tiles."""
        tile = np.ascontiguousarray(self.part(field, self._grid.slices), np.float64)
        numbers = _mix(tile.view(np.uint64) ^ _mix(self._grid.natural_ids().astype(np.uint64)))
        local_sum, total = np.array([numbers.sum(dtype=np.uint64)]), np.zeros(1, np.uint64)
        self._grid.comm.mpi.Allreduce(local_sum, total, op=MPI.SUM)
        digest.update(total.tobytes())

    def reduce(self, field: Shaped[np.ndarray, "*held"], how: Reduction) -> float:
        tile, comm = self.part(field, self._grid.slices), self._grid.comm.mpi
        if how == "mean":
            return comm.allreduce(float(np.sum(tile))) / self._grid.size
        return comm.allreduce(float(getattr(tile, how)()), MPI.MIN if how == "min" else MPI.MAX)


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Return a hash of each number of 64 bits (the finalizer of splitmix64, Vigna 2015)."""
    with np.errstate(over="ignore"):
        numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def wider(window: Window, shape: Sequence[int], margin: int) -> Window:
    """Return a window extended by `margin` cells on all sides, within the model."""
    return tuple(
        slice(max(part.start - margin, 0), min(part.stop + margin, n))
        for part, n in zip(window, shape, strict=True)
    )


def relative(window: Window, to: Window, shape: Sequence[int]) -> Window:
    """Return the slices of a window in an array that has the cells of `to`."""
    starts = [part.indices(n) for part, n in zip(window, shape, strict=True)]
    return tuple(
        slice(start - other.start, stop - other.start)
        for (start, stop, _), other in zip(starts, to, strict=True)
    )
