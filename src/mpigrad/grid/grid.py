"""Cell-centred Cartesian grids in one to three dimensions, one tile per rank."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpigrad.collective_errors import assert_same_on_all_ranks, raise_error, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve

__all__ = [
    "Grid",
    "Neighbor",
    "check_arguments",
    "choose_dims",
]

# ---- The division of a grid's cells into tiles, and the checks of a grid's arguments ----


def choose_dims(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Choose how many tiles along each axis `ranks` ranks divide `shape` cells into.

    It is like MPI_Dims_create, but takes the shape into account. Among all factorizations that
    leave no tile empty it chooses the one that cuts the fewest faces between cells, then the one
    whose largest tile is smallest, then the one with more tiles along the first axes.

    Raises
    ------
    ValueError
        If every factorization leaves a tile without a cell.
    """
    fitting = list(_factorizations(ranks, shape))
    if not fitting:
        most = next(n for n in range(ranks - 1, 0, -1) if any(_factorizations(n, shape)))
        raise ValueError(
            f"Grid: every tile must have a cell, but {ranks} ranks cannot share {_product(shape)} "
            f"cells: every division of {ranks} ranks into tiles has more tiles than cells along an "
            f"axis. Use at most {most} ranks (-n {most}), or more cells."
        )

    def cost(dims: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        size = math.prod(shape)
        cut = sum((p - 1) * (size // n) for p, n in zip(dims, shape, strict=True))
        largest = math.prod(math.ceil(n / p) for p, n in zip(dims, shape, strict=True))
        return cut, largest, tuple(-p for p in dims)

    return min(fitting, key=cost)


def _factorizations(ranks: int, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `ranks` as a product of one factor per axis, at most its cells."""
    if not shape:
        yield from [()] if ranks == 1 else []
        return
    for p in range(1, min(ranks, shape[0]) + 1):
        if ranks % p == 0:
            yield from ((p, *rest) for rest in _factorizations(ranks // p, shape[1:]))


def _product(numbers: tuple[int, ...]) -> str:
    return " x ".join(map(str, numbers))


Arguments = tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...], tuple[bool, ...]]


def check_arguments(shape: Any, spacing: Any, dims: Any, periodic: Any, ranks: int) -> Arguments:
    """Return the grid's arguments in their own types, or raise an error."""
    try:
        cells = tuple(operator.index(n) for n in shape)
        lengths = tuple(float(h) for h in spacing)
        if not 1 <= len(cells) <= 3 or len(lengths) != len(cells):
            raise ValueError
    except (TypeError, ValueError):
        raise TypeError(
            "Grid: shape must be one to three integers, and spacing as many lengths, got "
            f"shape={shape!r}, spacing={spacing!r}. Write Grid((nx, ny), (hx, hy)), for example."
        ) from None
    if min(cells) < 1:
        raise ValueError(
            f"Grid: shape must have at least one cell along each axis, got {_product(cells)} "
            "cells. Give positive numbers."
        )
    if not all(h > 0 and math.isfinite(h) for h in lengths):
        raise ValueError(
            f"Grid: spacing must be positive and finite, got {lengths}. Give the size of a cell "
            "along each axis."
        )
    rings = (periodic,) * len(cells) if isinstance(periodic, bool) else periodic
    if not isinstance(rings, tuple | list) or [type(ring) for ring in rings] != [bool] * len(cells):
        raise TypeError(
            f"Grid: periodic must be True or False, or {len(cells)} of them, one per axis, got "
            f"{periodic!r}. Use bool() for other types."
        )
    rings = tuple(rings)
    if dims is None:
        return cells, lengths, choose_dims(cells, ranks), rings
    try:
        tiles = tuple(operator.index(p) for p in dims)
        if len(tiles) != len(cells):
            raise ValueError
    except (TypeError, ValueError):
        raise TypeError(
            f"Grid: dims must be {len(cells)} integers, one per axis, got {dims!r}. Leave dims out "
            "to have them chosen."
        ) from None
    if min(tiles) < 1 or math.prod(tiles) != ranks:
        raise ValueError(
            f"Grid: dims must make one tile per rank, got dims {tiles}, which make "
            f"{math.prod(tiles)} tiles, for {ranks} ranks. Leave dims out to have them chosen."
        )
    if any(p > n for p, n in zip(tiles, cells, strict=True)):
        raise ValueError(
            f"Grid: every tile must have a cell, but dims {tiles} divide {_product(cells)} cells "
            "into tiles without cells. Leave dims out to have them chosen, or use fewer ranks."
        )
    return cells, lengths, tiles, rings


# ---- Cell-centred Cartesian grids in one to three dimensions, one tile per rank ----


Step = Literal[-1, 0, 1]


@dataclasses.dataclass(frozen=True)
class Neighbor:
    """A tile that touches this rank's tile on a face, along an edge or at a corner.

    If a periodic axis has one or two tiles, a rank is found at several steps, and a tile may be its
    own neighbour.

    Attributes
    ----------
    rank
        The rank of the tile.
    step
        The number of tiles (-1, 0 or 1) from this tile to the neighbour along each axis.

    Examples
    --------
    >>> from mpigrad.grid import Grid
    >>> ring = Grid((8,), (0.1,), periodic=True)
    >>> ring.neighbors[0]
    Neighbor(rank=0, step=(-1,))
    """

    rank: int
    step: tuple[Step, ...]


@dataclasses.dataclass(frozen=True, init=False)
class Grid:
    """A Cartesian grid of nx, nx x ny or nx x ny x nz cells, one tile per rank.

    Unknowns are at cell centres. Tiles are numbered like MPI's Cartesian ranks (the last axis
    varies fastest). If the cells along an axis do not divide evenly, the first tiles have one cell
    more.

    *Tile numbering* numbers the cells of rank 0 first, then those of rank 1, and so on, in C order
    within a tile. So the cells of each rank are the contiguous rows `row_offset` to `row_offset +
    n_local` of a distributed vector or matrix.

    Making a grid is collective: all ranks of `comm` make it, with the same arguments.

    Parameters
    ----------
    shape
        The number of cells along each axis: (nx,), (nx, ny) or (nx, ny, nz).
    spacing
        The size of a cell along each axis, as (hx, hy), in the user's unit of length.
    comm
        The communicator of the ranks that share the grid. Default: the communicator of the
        enclosing `with`, or all ranks.
    dims
        The number of tiles along each axis. Default: the numbers that cut the fewest faces between
        cells.
    periodic
        True if the first cell along an axis follows the last. One value for all axes, or one for
        each.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if an argument has the wrong type, a size is not positive, the number of tiles
        is not the number of ranks, a tile would be empty, or the arguments differ between ranks.

    Examples
    --------
    >>> from mpigrad.grid import Grid
    >>> grid = Grid((40, 30), spacing=(0.1, 0.1))
    >>> grid.dims, grid.local_shape
    ((1, 1), (40, 30))
    >>> x, y = grid.centers()
    >>> x.shape
    (40, 30)
    """

    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    comm: Communicator
    dims: tuple[int, ...]
    periodic: tuple[bool, ...]

    def __init__(
        self,
        shape: tuple[int, ...],
        spacing: tuple[float, ...],
        comm: Communicator | None = None,
        *,
        dims: tuple[int, ...] | None = None,
        periodic: bool | tuple[bool, ...] = False,
    ) -> None:
        comm = resolve(comm)
        checked: Any = ()
        with raise_on_all_ranks(comm):
            checked = check_arguments(shape, spacing, dims, periodic, comm.size)
        assert_same_on_all_ranks(comm, checked, "Grid: shape, spacing, dims and periodic")
        values = zip(("shape", "spacing", "dims", "periodic"), checked, strict=True)
        for name, value in (("comm", comm), *values):
            object.__setattr__(self, name, value)  # the class is frozen from here on

    # --- the tiles ---

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of cells of the whole grid."""
        return math.prod(self.shape)

    @property
    def coords(self) -> tuple[int, ...]:
        """The position of this rank's tile among the tiles."""
        return self.coords_of(self.comm.rank)

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the position of a rank's tile among the tiles."""
        place = []
        for tiles in reversed(self.dims):
            rank, along = divmod(rank, tiles)
            place.append(along)
        return tuple(reversed(place))

    def starts(self, axis: int) -> NDArray[np.int64]:
        """Return the first cell of each tile along `axis`, followed by the number of cells."""
        cells, tiles = self.shape[axis], self.dims[axis]
        number = np.arange(tiles + 1)
        return number * (cells // tiles) + np.minimum(number, cells % tiles)

    def slices_of(self, rank: int) -> tuple[slice, ...]:
        """Return the cells of a rank's tile, as slices of the whole grid."""
        return tuple(
            slice(int(self.starts(axis)[place]), int(self.starts(axis)[place + 1]))
            for axis, place in enumerate(self.coords_of(rank))
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """The cells of this rank's tile, as slices of the whole grid."""
        return self.slices_of(self.comm.rank)

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The number of cells of this rank's tile along each axis."""
        return tuple(part.stop - part.start for part in self.slices)

    @property
    def smallest_tile(self) -> tuple[int, ...]:
        """The smallest number of cells that any tile has along each axis."""
        return tuple(n // p for n, p in zip(self.shape, self.dims, strict=True))

    def rank_at(self, place: tuple[int, ...]) -> int | None:
        """Return the rank of the tile at a position among the tiles, or None outside the grid."""
        wrapped = [
            at % tiles if ring else at
            for at, tiles, ring in zip(place, self.dims, self.periodic, strict=True)
        ]
        if not all(0 <= at < tiles for at, tiles in zip(wrapped, self.dims, strict=True)):
            return None
        return int(np.ravel_multi_index(tuple(wrapped), self.dims))

    @functools.cached_property
    def neighbors(self) -> tuple[Neighbor, ...]:
        """The tiles that touch this one, edges and corners included, ordered by step."""
        steps: tuple[Step, ...] = (-1, 0, 1)
        tiles = []
        for step in itertools.product(steps, repeat=self.ndim):
            rank = self.rank_at(tuple(p + s for p, s in zip(self.coords, step, strict=True)))
            if any(step) and rank is not None:
                tiles.append(Neighbor(rank, step))
        return tuple(tiles)

    # --- the numbering of the unknowns ---

    @property
    def n_local(self) -> int:
        """The number of cells of this rank's tile."""
        return math.prod(self.local_shape)

    @functools.cached_property
    def row_offsets(self) -> NDArray[np.int64]:
        """The first row of each rank in tile numbering, followed by the number of cells."""
        widths = (np.diff(self.starts(axis)) for axis in range(self.ndim))
        sizes = functools.reduce(np.multiply.outer, widths).ravel()
        return np.concatenate([[0], np.cumsum(sizes)])

    @property
    def row_offset(self) -> int:
        """The first row of this rank in tile numbering."""
        return int(self.row_offsets[self.comm.rank])

    def rows(self, *cells: ArrayLike) -> NDArray[np.int64]:
        """Return the rows of cells in tile numbering, or -1 outside the grid.

        Along a periodic axis indices are taken modulo its cells.

        Parameters
        ----------
        cells
            An array of indices for each axis, as `rows(i, j)`. They are broadcast together.
        """
        if len(cells) != self.ndim:
            raise TypeError(
                f"Grid.rows: expected one array of indices for each axis, got {len(cells)} arrays "
                f"of indices on a grid with {self.ndim} axes. Give {self.ndim} arrays."
            )
        owner, within, inside = np.int64(0), np.int64(0), np.True_
        for axis, indices in enumerate(cells):
            starts, cell = self.starts(axis), np.asarray(indices, np.int64)
            cell = cell % self.shape[axis] if self.periodic[axis] else cell
            here = (cell >= 0) & (cell < self.shape[axis])
            cell = np.where(here, cell, 0)
            tile = np.searchsorted(starts, cell, side="right") - 1
            owner = owner * self.dims[axis] + tile
            within = within * np.diff(starts)[tile] + (cell - starts[tile])
            inside = inside & here
        return np.where(inside, self.row_offsets[owner] + within, -1)

    def local_rows(self, width: int = 0) -> NDArray[np.int64]:
        """Return the rows of this tile's cells and of `width` layers around it.

        The shape is (lx + 2 width, ly + 2 width) for a tile of lx x ly cells, as `halo_exchange`
        pads it. Cells outside the grid have the row -1.
        """
        cells = (np.arange(part.start - width, part.stop + width) for part in self.slices)
        return self.rows(*np.ix_(*cells))

    def natural_ids(self) -> NDArray[np.int64]:
        """Return the numbers of this tile's cells in C order of the whole grid."""
        cells = np.ix_(*(np.arange(part.start, part.stop) for part in self.slices))
        return np.asarray(np.ravel_multi_index(cells, self.shape), np.int64)

    # --- fields ---

    def centers(self) -> tuple[NDArray[np.float64], ...]:
        """Return the coordinates of the centres of this tile's cells.

        They are arrays (x, y), each of shape (lx, ly). The grid's first corner is the origin.
        """
        along = (
            (np.arange(part.start, part.stop) + 0.5) * h
            for part, h in zip(self.slices, self.spacing, strict=True)
        )
        return tuple(np.meshgrid(*along, indexing="ij"))

    def gather(self, u: ArrayLike | jax.Array, stride: int = 1) -> NDArray[Any] | None:
        """Gather a field on rank 0, for files and pictures. It is not differentiable.

        Parameters
        ----------
        u
            This rank's tile of the field, of shape (lx, ly, *rest).
        stride
            Take only every `stride`-th cell along each axis, to draw a field that is too large for
            one rank.

        Returns
        -------
        The whole field on rank 0, None on the other ranks.
        """
        local = np.asarray(u)
        with raise_on_all_ranks(self.comm):
            if local.shape[: self.ndim] != self.local_shape:
                raise ValueError(
                    "Grid.gather: the first axes of the field must be those of the tile of "
                    f"{self.local_shape} cells, got shape {local.shape} on rank {self.comm.rank}. "
                    "Give this rank's tile of the field."
                )
        thin = tuple(slice(-part.start % stride, None, stride) for part in self.slices)
        piece = np.ascontiguousarray(local[thin])
        if self.comm.rank != 0:
            self.comm.send_object(piece, 0)
            return None
        shape = tuple(math.ceil(n / stride) for n in self.shape)
        whole = np.empty(shape + local.shape[self.ndim :], local.dtype)
        for rank in range(self.comm.size):
            if rank > 0:
                piece = self.comm.receive_object(rank)
            place = tuple(
                slice(math.ceil(part.start / stride), math.ceil(part.stop / stride))
                for part in self.slices_of(rank)
            )
            whole[place] = piece
        return whole

    def scatter(self, whole: ArrayLike | None) -> NDArray[Any]:
        """Distribute a field from rank 0 to the tiles of all ranks. It is not differentiable.

        Parameters
        ----------
        whole
            The field on rank 0, of shape (nx, ny, *rest). It is not read on other ranks.

        Returns
        -------
        This rank's tile of the field, of shape (lx, ly, *rest).
        """
        problem, field = None, np.empty(0)
        if self.comm.rank == 0:
            field = np.asarray(whole)
            if field.shape[: self.ndim] != self.shape:
                problem = (
                    f"Grid.scatter: the first axes of the field must be the {self.shape} cells of "
                    f"the grid, got shape {field.shape} on rank 0. Give the whole field."
                )
        raise_error(self.comm, None if problem is None else ValueError(problem))
        if self.comm.rank != 0:
            return self.comm.receive_object(0)
        for rank in range(1, self.comm.size):
            self.comm.send_object(np.ascontiguousarray(field[self.slices_of(rank)]), rank)
        return field[self.slices]
