"""Cell-centred Cartesian grids in one to three dimensions, one tile per rank."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpigrad.collective_errors import raise_error, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.grid.decomposition import check_arguments, choose_dims

__all__ = ["Grid", "Neighbor", "choose_dims"]

Step = Literal[-1, 0, 1]


@dataclasses.dataclass(frozen=True)
class Neighbor:
    """A tile that touches this rank's tile on a face, along an edge or at a corner.

    `rank` holds it; it lies `step` tiles away along each axis (-1, 0 or 1). Where a periodic axis
    has one or two tiles, a rank is found at several steps, and a tile beside itself.
    """

    rank: int
    step: tuple[Step, ...]


@dataclasses.dataclass(frozen=True, init=False)
class Grid:
    """A grid of nx, nx x ny or nx x ny x nz cells, one tile per rank, unknowns at cell centres.

    Tiles are numbered like MPI's Cartesian ranks (the last axis fastest); along an axis the first
    tiles have one cell more where the cells do not divide evenly. *Tile numbering* of the cells:
    rank after rank, and within a tile in C order, so that each rank's cells are the contiguous
    rows `row_offset` to `row_offset + n_local` of a distributed vector or matrix.

    Making a grid is collective: all ranks of `comm` make it with the same arguments.

    Parameters
    ----------
    shape
        Number of cells along each axis: (nx,), (nx, ny) or (nx, ny, nz).
    spacing
        Size of a cell along each axis, as (hx, hy), in the user's unit of length.
    comm
        The ranks that share the grid; all ranks if not given.
    dims
        Number of tiles along each axis; chosen by `choose_dims` if not given.
    periodic
        Whether the last cell along an axis is followed by the first: one answer for all axes, or
        one for each.

    Raises
    ------
    ValueError
        On all ranks: if a size is not positive, the tiles are not one per rank, a tile would be
        empty, or the ranks disagree about the arguments.
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
        dims: tuple[int, ...] | None = None,
        periodic: bool | tuple[bool, ...] = False,
    ) -> None:
        comm = resolve(comm)
        checked = problem = None
        try:
            checked = check_arguments(shape, spacing, dims, periodic, comm.size)
        except (TypeError, ValueError) as error:
            problem = error
        # A rank that sees a mistake alone must not leave the others waiting in the next message.
        opinions = comm.mpi.allgather((checked, problem))
        for rank, (_, error) in enumerate(opinions):
            if error is not None:
                raise type(error)(f"{error} (rank {rank})")
        for rank, (opinion, _) in enumerate(opinions):
            if opinion != opinions[0][0]:
                raise ValueError(
                    "mpigrad.Grid: the ranks disagree about the grid: rank 0 gives shape, "
                    f"spacing, dims and periodic {opinions[0][0]}, rank {rank} gives {opinion}. "
                    "Make the grid with the same arguments on every rank."
                )
        values = zip(("shape", "spacing", "dims", "periodic"), opinions[0][0], strict=True)
        for name, value in (("comm", comm), *values):
            object.__setattr__(self, name, value)  # the class is frozen from here on

    # --- the tiles ---

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of cells of the whole grid."""
        return math.prod(self.shape)

    @property
    def coords(self) -> tuple[int, ...]:
        """Position of this rank's tile among the tiles."""
        return self.coords_of(self.comm.rank)

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Position of a rank's tile among the tiles."""
        place = []
        for tiles in reversed(self.dims):
            rank, along = divmod(rank, tiles)
            place.append(along)
        return tuple(reversed(place))

    def starts(self, axis: int) -> NDArray[np.int64]:
        """First cell of each tile along `axis`, and the number of cells last."""
        cells, tiles = self.shape[axis], self.dims[axis]
        number = np.arange(tiles + 1)
        return number * (cells // tiles) + np.minimum(number, cells % tiles)

    def slices_of(self, rank: int) -> tuple[slice, ...]:
        """The cells of a rank's tile, as slices of the whole grid."""
        return tuple(
            slice(int(self.starts(axis)[place]), int(self.starts(axis)[place + 1]))
            for axis, place in enumerate(self.coords_of(rank))
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """The cells of this rank's tile, as slices of the whole grid."""
        return self.slices_of(self.comm.rank)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Number of cells of this rank's tile along each axis."""
        return tuple(part.stop - part.start for part in self.slices)

    @property
    def smallest_tile(self) -> tuple[int, ...]:
        """The smallest number of cells that any tile has along each axis."""
        return tuple(n // p for n, p in zip(self.shape, self.dims, strict=True))

    def rank_at(self, place: tuple[int, ...]) -> int | None:
        """The rank of the tile at a place among the tiles; None outside the grid."""
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
        found = []
        for step in itertools.product(steps, repeat=self.ndim):
            rank = self.rank_at(tuple(p + s for p, s in zip(self.coords, step, strict=True)))
            if any(step) and rank is not None:
                found.append(Neighbor(rank, step))
        return tuple(found)

    # --- the numbering of the unknowns ---

    @property
    def n_local(self) -> int:
        """Number of cells of this rank's tile."""
        return math.prod(self.local_shape)

    @functools.cached_property
    def row_offsets(self) -> NDArray[np.int64]:
        """First row of each rank in tile numbering, and the number of cells last."""
        widths = (np.diff(self.starts(axis)) for axis in range(self.ndim))
        sizes = functools.reduce(np.multiply.outer, widths).ravel()
        return np.concatenate([[0], np.cumsum(sizes)])

    @property
    def row_offset(self) -> int:
        """First row of this rank in tile numbering."""
        return int(self.row_offsets[self.comm.rank])

    def rows(self, *cells: ArrayLike) -> NDArray[np.int64]:
        """The rows, in tile numbering, of cells of the grid; -1 outside it.

        Along a periodic axis no cell lies outside: the numbers are taken modulo its cells.
        Give one array of indices for each axis, as `rows(i, j)`; they are broadcast together.
        """
        if len(cells) != self.ndim:
            raise TypeError(
                f"mpigrad.Grid.rows: {len(cells)} arrays of indices on a grid with {self.ndim} "
                "axes; give one for each axis"
            )
        owner, within, inside = np.int64(0), np.int64(0), np.True_
        for axis, given in enumerate(cells):
            starts, cell = self.starts(axis), np.asarray(given, np.int64)
            cell = cell % self.shape[axis] if self.periodic[axis] else cell
            here = (cell >= 0) & (cell < self.shape[axis])
            cell = np.where(here, cell, 0)
            tile = np.searchsorted(starts, cell, side="right") - 1
            owner = owner * self.dims[axis] + tile
            within = within * np.diff(starts)[tile] + (cell - starts[tile])
            inside = inside & here
        return np.where(inside, self.row_offsets[owner] + within, -1)

    def local_rows(self, width: int = 0) -> NDArray[np.int64]:
        """Rows of this tile's cells and of `width` layers around it; -1 outside the grid.

        Shape (lx + 2 width, ly + 2 width) for a tile of lx x ly cells, as `halo_exchange` pads it.
        """
        cells = (np.arange(part.start - width, part.stop + width) for part in self.slices)
        return self.rows(*np.ix_(*cells))

    def natural_ids(self) -> NDArray[np.int64]:
        """Numbers of this tile's cells in C order of the whole grid, whatever the rank count."""
        cells = np.ix_(*(np.arange(part.start, part.stop) for part in self.slices))
        return np.asarray(np.ravel_multi_index(cells, self.shape), np.int64)

    # --- fields ---

    def centers(self) -> tuple[NDArray[np.float64], ...]:
        """Coordinates of the centres of this tile's cells, as (x, y), each of shape (lx, ly).

        The grid's first corner is the origin.
        """
        along = (
            (np.arange(part.start, part.stop) + 0.5) * h
            for part, h in zip(self.slices, self.spacing, strict=True)
        )
        return tuple(np.meshgrid(*along, indexing="ij"))

    def gather(self, u: ArrayLike | jax.Array, stride: int = 1) -> NDArray[Any] | None:
        """The whole field on rank 0, None elsewhere; for writing and drawing, not differentiable.

        Parameters
        ----------
        u
            This rank's tile of the field, of shape (lx, ly, *rest).
        stride
            Only every `stride`-th cell along each axis, to draw a field too large for one rank.
        """
        local = np.asarray(u)
        with raise_on_all_ranks(self.comm):
            if local.shape[: self.ndim] != self.local_shape:
                raise ValueError(
                    f"mpigrad.Grid.gather: a field of shape {local.shape} on a tile of "
                    f"{self.local_shape} cells (rank {self.comm.rank})"
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
        """A field that rank 0 holds whole, tile by tile on all ranks; not differentiable.

        Parameters
        ----------
        whole
            On rank 0 the field, of shape (nx, ny, *rest); not read on other ranks.
        """
        problem, field = None, np.empty(0)
        if self.comm.rank == 0:
            field = np.asarray(whole)
            if field.shape[: self.ndim] != self.shape:
                problem = (
                    f"mpigrad.Grid.scatter: the field has shape {field.shape}, "
                    f"the grid has {self.shape} cells"
                )
        raise_error(self.comm, None if problem is None else ValueError(problem))
        if self.comm.rank != 0:
            return self.comm.receive_object(0)
        for rank in range(1, self.comm.size):
            self.comm.send_object(np.ascontiguousarray(field[self.slices_of(rank)]), rank)
        return field[self.slices]
