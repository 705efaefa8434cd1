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
from mpigrad.extend import take
from mpigrad.grid import Grid, halo_exchange

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
SMALLEST_SCALE = 1e-3  # lower bound of the scales, relative to the largest observed value


@dataclasses.dataclass(frozen=True)
class Observations:
    """Observed values of u. Each is a weighted sum of cells, on the rank that has its cell.

    Attributes
    ----------
    cells
        Shape (k, m): indices into this rank's tile, padded by `layers` and flattened.
    weights
        Shape (k, m): weights of these cells.
    values
        Shape (k,): the observed values.
    scales
        Shape (k,): the loss divides the differences from the observed values by these.
    norm
        Sum over all ranks of the squares of values / scales.
    count
        Number of observations of all ranks.
    layers
        0 if every observation on every rank needs only cells of the rank's tile, else 1.
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
        """Predict the observations from this rank's tile of u (lx, ly): shape (k,)."""
        padded = halo_exchange(u, self.grid, width=1, boundary=0.0) if self.layers else u
        return jnp.sum(take(padded.ravel(), self.cells) * self.weights, axis=1)

    def tile(self) -> Float[np.ndarray, "lx ly"]:
        """Return this rank's tile (lx, ly) of the observed values of cells, NaN elsewhere."""
        tile = np.full(self.grid.n_local, np.nan)
        tile[self.cells[:, 0]] = self.values
        return tile.reshape(self.grid.local_shape)

    def loss(self, u: Float[Array, "lx ly"]) -> Float[Array, ""]:
        """Compute this rank's share of the loss, whose sum over ranks is 1 for u = 0.

        The loss is sum ((prediction - value) / scale)^2 / sum (value / scale)^2. Both sums include
        the observations of all ranks.
        """
        return jnp.sum(((self.predict(u) - self.values) / self.scales) ** 2) / self.norm


def draw_mask(grid: Grid, fraction: float, seed: int) -> Bool[np.ndarray, "lx ly"]:
    """Draw each cell of the grid with probability `fraction`, and return this rank's tile.

    The draw of a cell depends only on the seed and on its place in the grid. So the mask is the
    same for any number of ranks.

    Raises
    ------
    ValueError
        On all ranks, if no cell is drawn.

    Examples
    --------
    >>> import jax
    >>> from mpigrad_apps.poisson import draw_mask, unit_square
    >>> with jax.enable_x64(True):
    ...     mask = draw_mask(unit_square((4, 4)), 0.5, seed=0)
    >>> mask.shape
    (4, 4)
    """
    drawn = _draw(grid, seed, 0, jax.random.uniform) < fraction
    _some(grid, int(np.sum(drawn)), "no cell is observed. Increase --observed or use more cells.")
    return drawn


def relative_noise(grid: Grid, seed: int) -> Float[np.ndarray, "lx ly"]:
    """Draw a standard normal value for each cell of this tile, equal for any number of ranks."""
    return _draw(grid, seed, 1, jax.random.normal)


def observe_cells(
    grid: Grid,
    mask: NDArray[np.bool_],
    values: NDArray[np.float64],
    misfit: Misfit = "relative",
) -> Observations:
    """Make observations at the centres of cells (collective).

    Parameters
    ----------
    grid
        The grid of the cells.
    mask
        True for observed cells: this rank's tile (lx, ly), or the whole grid (nx, ny).
    values
        The observed values, in the shape of the mask. Values of other cells are ignored.
    misfit
        "relative" divides a difference by the observed value, but at least by `SMALLEST_SCALE`
        times the largest observed value. "absolute" divides all differences by the largest value.

    Raises
    ------
    ValueError
        On all ranks, if the shapes do not fit, or values are not finite or all zero.

    Examples
    --------
    >>> import numpy as np
    >>> from mpigrad_apps.poisson import observe_cells, unit_square
    >>> grid = unit_square((4, 4))
    >>> observe_cells(grid, np.ones((4, 4), bool), np.full((4, 4), 2.0)).count
    16
    """
    with raise_on_all_ranks(grid.comm):
        mask, values = np.asarray(mask, bool), np.asarray(values, float)
        if mask.shape == grid.shape and values.shape == grid.shape:
            mask, values = mask[grid.slices], values[grid.slices]
        if mask.shape != grid.local_shape or values.shape != grid.local_shape:
            raise ValueError(
                f"observe_cells: mask and values must both have the shape of the grid, "
                f"{grid.shape}, or of this rank's tile, {grid.local_shape}, got {mask.shape} and "
                f"{values.shape} on rank {grid.comm.rank}."
            )
        observed = values[mask]
        if not np.all(np.isfinite(observed)):
            raise ValueError(
                f"observe_cells: the observed values must be finite, but "
                f"{np.sum(~np.isfinite(observed))} of {observed.size} are not on rank "
                f"{grid.comm.rank}. Leave these cells out of the mask."
            )
    cells = np.flatnonzero(mask)[:, None]
    return _observations(grid, cells, np.ones(cells.shape), observed, misfit, layers=0)


def observe_points(
    grid: Grid,
    coordinates: Float[np.ndarray, "k 2"],
    values: Float[np.ndarray, " k"],
    misfit: Misfit = "relative",
) -> Observations:
    """Make observations at points, by bilinear interpolation between the centres (collective).

    Between the outermost centres and the boundary, u is continued as an odd function, so that it is
    zero on the boundary.

    Parameters
    ----------
    grid
        The grid of the cells.
    coordinates
        Shape (k, 2): all points, the same on every rank. The rank that has the cell of a point
        keeps the point.
    values
        Shape (k,): the observed values of all points.
    misfit
        See `observe_cells`.

    Raises
    ------
    ValueError
        On all ranks, if there are no points, or all values are zero.

    Examples
    --------
    >>> import numpy as np
    >>> from mpigrad_apps.poisson import observe_points, unit_square
    >>> points = np.array([[0.3, 0.4], [0.6, 0.7]])
    >>> observe_points(unit_square((4, 4)), points, np.array([1.0, 2.0])).count
    2
    """
    # In units of cells, relative to the first centre.
    place = coordinates / np.asarray(grid.spacing) - 0.5
    owner_cell = np.clip(np.rint(place), 0, np.asarray(grid.shape) - 1).astype(np.int64)
    is_local = np.ones(len(values), bool)
    for axis, part in enumerate(grid.slices):
        is_local &= (owner_cell[:, axis] >= part.start) & (owner_cell[:, axis] < part.stop)
    place, values = place[is_local], values[is_local]
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
    count = _some(grid, len(values), "there are no observations. Give at least one.")
    mpi = grid.comm.mpi
    largest = max(mpi.allgather(float(np.max(np.abs(values), initial=0.0))))
    if not largest > 0:
        raise ValueError(
            "poisson: every observed value is zero, and such values do not depend on kappa. "
            "Observe u at points where it is not zero."
        )
    scales = np.full(values.shape, largest)
    if misfit == "relative":
        scales = np.maximum(np.abs(values), SMALLEST_SCALE * largest)
    # Summed in one order on every rank, so that the scale of the loss is the same on all ranks.
    norm = float(np.sum(mpi.allgather(float(np.sum((values / scales) ** 2)))))
    return Observations(grid, cells, weights, values, scales, norm, count, layers)


def _some(grid: Grid, here: int, otherwise: str) -> int:
    count = sum(grid.comm.mpi.allgather(here))
    if count == 0:
        raise ValueError(f"poisson: {otherwise}")
    return count


def _draw(grid: Grid, seed: int, stream: int, distribution) -> NDArray:  # type: ignore[no-untyped-def]
    @jax.jit
    def draw(seed: Array, cells: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), stream)
        # One random stream for each cell, keyed by its index in the grid.
        return jax.vmap(lambda c: distribution(jax.random.fold_in(key, c), dtype=jnp.float64))(
            cells
        )

    return np.asarray(draw(seed, grid.natural_ids().ravel())).reshape(grid.local_shape)


_FIELDS = ("coordinates", "values", "source")


@dataclasses.dataclass(frozen=True)
class Data:
    """A user's observations: coordinates (k, 2), values (k,), source () or (nx, ny)."""

    coordinates: Float[np.ndarray, "k 2"]
    values: Float[np.ndarray, " k"]
    source: Float[np.ndarray, ""] | Float[np.ndarray, "nx ny"]


def read_data(path: pathlib.Path, grid: Grid) -> Data:
    """Read and check a user's data file on rank 0, and send it to all ranks (collective).

    The .npz file has `coordinates` (k, 2) in the unit square, `values` (k,) and `source`, a number
    or an array (nx, ny). It may have `mask` (k,), which is True for the observations to use. Other
    fields are errors.

    Raises
    ------
    ValueError
        On every rank, if the content of the file is not valid. The message names the field.
    FileNotFoundError
        On every rank, if the file does not exist.

    Examples
    --------
    >>> import pathlib
    >>> import numpy as np
    >>> from mpigrad_apps.poisson import read_data, unit_square
    >>> path = pathlib.Path("data.npz")
    >>> np.savez(path, coordinates=np.array([[0.3, 0.4]]), values=np.array([1.0]), source=-1.0)
    >>> read_data(path, unit_square((4, 4))).values
    array([1.])
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
    missing = [name for name in _FIELDS if name not in fields]
    if missing:
        raise ValueError(
            f"{path}: there is no field named {' or '.join(missing)} (found: "
            f"{', '.join(fields) or 'no fields'}). {help_text}"
        )
    unknown = [name for name in fields if name not in (*_FIELDS, "mask")]
    if unknown:
        raise ValueError(
            f"{path}: expected the fields {', '.join(_FIELDS)} and mask, got {unknown[0]}, which "
            f"is not applied. Leave it out. {help_text}"
        )
    arrays = {}
    for name in _FIELDS:
        try:
            if np.iscomplexobj(fields[name]):
                raise TypeError(name)
            arrays[name] = np.asarray(fields[name], float)
        except (TypeError, ValueError):
            raise ValueError(
                f"{path}: {name} must be an array of real numbers, got dtype {fields[name].dtype}."
            ) from None
    coordinates, values, source = (arrays[name] for name in _FIELDS)
    if coordinates.ndim != 2 or coordinates.shape[1] != 2:
        raise ValueError(f"{path}: coordinates must have shape (k, 2), got {coordinates.shape}.")
    if values.shape != coordinates.shape[:1]:
        raise ValueError(
            f"{path}: values must have shape ({len(coordinates)},), one for each of the "
            f"coordinates, got {values.shape}."
        )
    if source.shape not in ((), cells):
        raise ValueError(
            f"{path}: source must be a number or have one value per cell, shape {cells} for "
            f"--cells {cells[0]} {cells[1]}, got shape {source.shape}."
        )
    if "mask" in fields:
        mask = fields["mask"]
        if mask.dtype != np.bool_ or mask.shape != values.shape:
            raise ValueError(
                f"{path}: mask must have one boolean per observation, shape {values.shape}, got "
                f"shape {mask.shape} and dtype {mask.dtype}."
            )
        coordinates, values = coordinates[mask], values[mask]
    for name, array in (("coordinates", coordinates), ("values", values), ("source", source)):
        bad = int(np.sum(~np.isfinite(array)))
        if bad:
            raise ValueError(
                f"{path}: {name} must be finite, but {bad} of {array.size} values are not. Leave "
                "them out, or correct them."
            )
    outside = np.flatnonzero(np.any((coordinates < 0) | (coordinates > 1), axis=1))
    if outside.size:
        raise ValueError(
            f"{path}: coordinates must lie in the unit square, but {outside.size} of "
            f"{len(values)} do not. The first is {tuple(coordinates[outside[0]].tolist())}."
        )
    if not len(values):
        raise ValueError(f"{path}: expected at least one observation, got none.")
    if not np.any(source):
        raise ValueError(
            f"{path}: the source is zero everywhere, so u is zero for every kappa. Give the source "
            "that made the observations."
        )
    return Data(coordinates, values, source)
