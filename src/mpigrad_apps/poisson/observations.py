"""Observations of u: cells drawn at random, or the user's own points."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import NDArray

from mpigrad.collective_errors import call_on_root, raise_on_all_ranks
from mpigrad.grid import Grid, halo_exchange
from mpigrad.operations.indexing import take

__all__ = [
    "Data",
    "Observations",
    "draw_mask",
    "observe_cells",
    "observe_points",
    "read_data",
    "relative_noise",
]


Misfit = Literal["relative", "absolute"]
SMALLEST_SCALE = 1e-3  # of the largest observed value: what is smaller is measured as this


@dataclasses.dataclass(frozen=True)
class Observations:
    """Observed values of u, each a weighted sum of cells near it, on the rank that has its cell.

    Attributes
    ----------
    cells
        Shape (k, m): positions in this rank's tile, padded by `layers`, flattened.
    weights
        Shape (k, m): their weights.
    values
        Shape (k,): what was observed.
    scales
        Shape (k,): what a difference from the observed value is measured by.
    norm
        Sum of the squares of all ranks' values / scales.
    count
        Number of observations of all ranks.
    layers
        0 where every observation needs only cells of this rank's tile, on all ranks; else 1.
    """

    grid: Grid
    cells: Int[np.ndarray, "k m"]
    weights: Float[np.ndarray, "k m"]
    values: Float[np.ndarray, " k"]
    scales: Float[np.ndarray, " k"]
    norm: float
    count: int
    layers: int

    def predict(self, u: Float[Array, "lx ly"]) -> Float[Array, " k"]:
        """What would be observed of this rank's tile of u (lx, ly); shape (k,), differentiable."""
        padded = halo_exchange(u, self.grid, width=1, boundary=0.0) if self.layers else u
        return jnp.sum(take(padded.ravel(), self.cells) * self.weights, axis=1)

    def tile(self) -> Float[np.ndarray, "lx ly"]:
        """Observed values on this rank's tile (lx, ly), NaN elsewhere; of observed cells only."""
        tile = np.full(self.grid.n_local, np.nan)
        tile[self.cells[:, 0]] = self.values
        return tile.reshape(self.grid.local_shape)

    def loss(self, u: Float[Array, "lx ly"]) -> Float[Array, ""]:
        """Share of this rank in sum ((prediction - value) / scale)^2 / sum (value / scale)^2.

        Both sums are over the observations of all ranks, so that u = 0 has loss 1.
        """
        return jnp.sum(((self.predict(u) - self.values) / self.scales) ** 2) / self.norm


def draw_mask(grid: Grid, fraction: float, seed: int) -> Bool[np.ndarray, "lx ly"]:
    """Observed cells of this tile: each cell of the grid is drawn with probability `fraction`.

    A cell's draw depends on the seed and its place in the grid alone, so the mask is the same for
    any number of ranks.
    """
    drawn = _draw(grid, seed, 0, jax.random.uniform) < fraction
    _some(grid, int(np.sum(drawn)), "no cell is observed: raise --observed or use more cells")
    return drawn


def relative_noise(grid: Grid, seed: int) -> Float[np.ndarray, "lx ly"]:
    """A standard normal number for each of this tile's cells, the same for any number of ranks."""
    return _draw(grid, seed, 1, jax.random.normal)


def observe_cells(
    grid: Grid,
    mask: NDArray[np.bool_],
    values: NDArray[np.float64],
    misfit: Misfit = "relative",
) -> Observations:
    """Observations at the centres of cells.

    Parameters
    ----------
    mask
        Which cells are observed: this rank's tile (lx, ly), or the whole grid (nx, ny).
    values
        The observed values, of the mask's shape; read only where the mask is true.
    misfit
        "relative": a difference is measured by the observed value, though by no less than
        `SMALLEST_SCALE` times the largest one; "absolute": all differences by the same.
    """
    with raise_on_all_ranks(grid.comm):
        mask, values = np.asarray(mask, bool), np.asarray(values, float)
        if mask.shape == grid.shape and values.shape == grid.shape:
            mask, values = mask[grid.slices], values[grid.slices]
        if mask.shape != grid.local_shape or values.shape != grid.local_shape:
            raise ValueError(
                f"poisson: a mask of shape {mask.shape} with values of shape {values.shape} does "
                f"not fit: both must have the shape of the grid, {grid.shape}, or of this rank's "
                f"tile, {grid.local_shape} (rank {grid.comm.rank})"
            )
        observed = values[mask]
        if not np.all(np.isfinite(observed)):
            raise ValueError(
                f"poisson: {np.sum(~np.isfinite(observed))} of the observed values are not finite "
                f"(rank {grid.comm.rank})"
            )
    cells = np.flatnonzero(mask)[:, None]
    return _observations(grid, cells, np.ones(cells.shape), observed, misfit, layers=0)


def observe_points(
    grid: Grid,
    coordinates: Float[np.ndarray, "k 2"],
    values: Float[np.ndarray, " k"],
    misfit: Misfit = "relative",
) -> Observations:
    """Observations at points, by bilinear interpolation between the cells' centres.

    Beyond the outermost centres u is continued oddly, so that it is zero on the boundary.

    Parameters
    ----------
    coordinates
        Shape (k, 2): all points, the same on every rank; each is kept by the rank that has its
        cell.
    values
        Shape (k,).
    misfit
        As for `observe_cells`.
    """
    # In units of cells, relative to the first centre.
    place = coordinates / np.asarray(grid.spacing) - 0.5
    owner_cell = np.clip(np.rint(place), 0, np.asarray(grid.shape) - 1).astype(np.int64)
    mine = np.ones(len(values), bool)
    for axis, part in enumerate(grid.slices):
        mine &= (owner_cell[:, axis] >= part.start) & (owner_cell[:, axis] < part.stop)
    place, values = place[mine], values[mine]
    low = np.floor(place).astype(np.int64)
    fraction = place - low
    cells, weights = [], []
    line = grid.local_shape[1] + 2
    for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
        number = np.zeros(len(values), np.int64)
        weight = np.ones(len(values))
        for axis, upper in enumerate(corner):
            cell = low[:, axis] + upper
            weight = weight * (fraction[:, axis] if upper else 1 - fraction[:, axis])
            inside = np.clip(cell, 0, grid.shape[axis] - 1)
            weight = np.where(inside == cell, weight, -weight)
            number = number * line + inside - grid.slices[axis].start + 1
        cells.append(number)
        weights.append(weight)
    return _observations(grid, np.stack(cells, 1), np.stack(weights, 1), values, misfit, layers=1)


def _observations(
    grid: Grid,
    cells: Int[np.ndarray, "k m"],
    weights: Float[np.ndarray, "k m"],
    values: Float[np.ndarray, " k"],
    misfit: Misfit,
    layers: int,
) -> Observations:
    count = _some(grid, len(values), "there is no observation")
    mpi = grid.comm.mpi
    largest = max(mpi.allgather(float(np.max(np.abs(values), initial=0.0))))
    if not largest > 0:
        raise ValueError(
            "poisson: every observed value is zero, which says nothing about kappa; "
            "observe u where the source moves it"
        )
    scales = np.full(values.shape, largest)
    if misfit == "relative":
        scales = np.maximum(np.abs(values), SMALLEST_SCALE * largest)
    # Summed in one order on every rank, so that the loss is scaled alike.
    norm = float(np.sum(mpi.allgather(float(np.sum((values / scales) ** 2)))))
    return Observations(grid, cells, weights, values, scales, norm, count, layers)


def _some(grid: Grid, here: int, otherwise: str) -> int:
    count = sum(grid.comm.mpi.allgather(here))
    if count == 0:
        raise ValueError(f"poisson: {otherwise}")
    return count


def _draw(grid: Grid, seed: int, stream: int, distribution) -> NDArray:  # type: ignore[no-untyped-def]
    key = jax.random.fold_in(jax.random.key(seed), stream)
    # One stream for each cell, keyed by its number in the grid.
    draw = jax.vmap(lambda cell: distribution(jax.random.fold_in(key, cell), dtype=jnp.float64))
    return np.asarray(jax.jit(draw)(jnp.asarray(grid.natural_ids().ravel()))).reshape(
        grid.local_shape
    )


@dataclasses.dataclass(frozen=True)
class Data:
    """A user's observations: coordinates (k, 2), values (k,), source () or (nx, ny)."""

    coordinates: Float[np.ndarray, "k 2"]
    values: Float[np.ndarray, " k"]
    source: Float[np.ndarray, ""] | Float[np.ndarray, "nx ny"]


def read_data(path: pathlib.Path, grid: Grid) -> Data:
    """Read and check a user's data file; rank 0 reads, all ranks get it, or its error.

    An .npz file with `coordinates` (k, 2) in the unit square, `values` (k,), `source`, a number or
    one per cell (nx, ny), and optionally `mask` (k,), which of the observations to use.

    Raises
    ------
    ValueError
        On every rank, if the file is not such a file; the message says what is wrong.
    """
    return call_on_root(grid.comm, lambda: _read_and_check(path, grid.shape))


def _read_and_check(path: pathlib.Path, cells: tuple[int, ...]) -> Data:
    help_text = (
        "Write it with numpy.savez(file, coordinates=(k, 2) points in the unit square, "
        "values=(k,) values of u there, source=a number or an (nx, ny) array)"
    )
    try:
        with np.load(path, allow_pickle=False) as archive:
            fields = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, pickle and NumPy each have errors of their own
        raise ValueError(f"{path} cannot be read as an .npz file: {error}. {help_text}") from error
    missing = [name for name in ("coordinates", "values", "source") if name not in fields]
    if missing:
        raise ValueError(
            f"{path}: no field named {' or '.join(missing)} (found: {', '.join(fields) or 'none'})."
            f" {help_text}"
        )
    arrays = {}
    for name in ("coordinates", "values", "source"):
        try:
            if np.iscomplexobj(fields[name]):
                raise TypeError(name)
            arrays[name] = np.asarray(fields[name], float)
        except (TypeError, ValueError):
            raise ValueError(f"{path}: {name} is not an array of real numbers") from None
    coordinates, values, source = (arrays[n] for n in ("coordinates", "values", "source"))
    if coordinates.ndim != 2 or coordinates.shape[1] != 2:
        raise ValueError(f"{path}: coordinates have shape {coordinates.shape}, expected (k, 2)")
    if values.shape != coordinates.shape[:1]:
        raise ValueError(
            f"{path}: values have shape {values.shape}, but there are {len(coordinates)} "
            f"coordinates; expected ({len(coordinates)},)"
        )
    if source.shape not in ((), cells):
        raise ValueError(
            f"{path}: source has shape {source.shape}; expected a number or one value per cell, "
            f"{cells} for --cells {cells[0]} {cells[1]}"
        )
    if "mask" in fields:
        mask = fields["mask"]
        if mask.dtype != np.bool_ or mask.shape != values.shape:
            raise ValueError(
                f"{path}: mask has shape {mask.shape} and type {mask.dtype}; expected one boolean "
                f"per observation, {values.shape}"
            )
        coordinates, values = coordinates[mask], values[mask]
    for name, array in (("coordinates", coordinates), ("values", values), ("source", source)):
        bad = int(np.sum(~np.isfinite(array)))
        if bad:
            raise ValueError(f"{path}: {bad} of {array.size} numbers in {name} are not finite")
    outside = np.flatnonzero(np.any((coordinates < 0) | (coordinates > 1), axis=1))
    if outside.size:
        raise ValueError(
            f"{path}: {outside.size} of {len(values)} coordinates lie outside the unit square, "
            f"the first is {tuple(coordinates[outside[0]].tolist())}"
        )
    if not len(values):
        raise ValueError(f"{path}: there is no observation in it")
    if not np.any(source):
        raise ValueError(f"{path}: the source is zero everywhere, so u is zero for any kappa")
    return Data(coordinates, values, source)
