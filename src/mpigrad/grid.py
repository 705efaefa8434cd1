"""Cell-centred Cartesian grids, divided into one rectangular tile per rank."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpigrad.communicator import Communicator, resolve

__all__ = ["Grid", "Neighbor", "choose_dims"]

Step = Literal[-1, 0, 1]


@dataclasses.dataclass(frozen=True)
class Neighbor:
    """A tile that touches this rank's tile along an edge or at a corner.

    `rank` holds it; it lies `step` tiles away along each axis (-1, 0 or 1).
    """

    rank: int
    step: tuple[Step, Step]


def choose_dims(shape: tuple[int, int], ranks: int) -> tuple[int, int]:
    """How many tiles along each axis `ranks` ranks divide `shape` cells into.

    Like MPI_Dims_create, but adapted to the grid: of all factorizations that leave no tile
    empty, the one that cuts the fewest faces between cells, then the one whose largest tile is
    smallest, then the one with more tiles along the first axis.

    Raises
    ------
    ValueError
        If every factorization leaves a tile without a cell.
    """
    nx, ny = shape
    fitting = [
        (px, ranks // px)
        for px in range(1, ranks + 1)
        if ranks % px == 0 and px <= nx and ranks // px <= ny
    ]
    if not fitting:
        raise ValueError(
            f"mpigrad.Grid: {ranks} ranks cannot share {nx} x {ny} cells: every division of "
            f"{ranks} ranks into rows and columns of tiles has more tiles than cells along an "
            f"axis. Use fewer ranks (-n) or more cells."
        )

    def cost(dims: tuple[int, int]) -> tuple[int, int, int]:
        px, py = dims
        largest = math.ceil(nx / px) * math.ceil(ny / py)
        return (px - 1) * ny + (py - 1) * nx, largest, -px

    return min(fitting, key=cost)


@dataclasses.dataclass(frozen=True, init=False)
class Grid:
    """A grid of nx x ny cells in one tile per rank, unknowns at the cells' centres.

    Tiles are numbered like MPI's Cartesian ranks (the last axis fastest); along an axis the first
    tiles have one cell more where the cells do not divide evenly. *Tile numbering* of the cells:
    rank after rank, and within a tile in C order, so that each rank's cells are the contiguous
    rows `row_offset` to `row_offset + n_local` of a distributed vector or matrix.

    Making a grid is collective: all ranks of `comm` make it with the same arguments.

    Parameters
    ----------
    shape
        Number of cells along each axis, (nx, ny).
    spacing
        Size of a cell along each axis, (hx, hy), in the user's unit of length.
    comm
        The ranks that share the grid; all ranks if not given.
    dims
        Number of tiles along each axis; chosen by `choose_dims` if not given.

    Raises
    ------
    ValueError
        On all ranks: if a size is not positive, the tiles are not one per rank, a tile would be
        empty, or the ranks disagree about the arguments.
    """

    shape: tuple[int, int]
    spacing: tuple[float, float]
    comm: Communicator
    dims: tuple[int, int]

    def __init__(
        self,
        shape: tuple[int, int],
        spacing: tuple[float, float],
        comm: Communicator | None = None,
        dims: tuple[int, int] | None = None,
    ) -> None:
        comm = resolve(comm)
        checked = problem = None
        try:
            checked = _checked(shape, spacing, dims, comm.size)
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
                    "mpigrad.Grid: the ranks disagree about the grid: rank 0 gives shape, spacing "
                    f"and dims {opinions[0][0]}, rank {rank} gives {opinion}. "
                    "Make the grid with the same arguments on every rank."
                )
        values = zip(("shape", "spacing", "dims"), opinions[0][0], strict=True)
        for name, value in (("comm", comm), *values):
            object.__setattr__(self, name, value)  # the class is frozen from here on

    # --- the tiles ---

    @property
    def size(self) -> int:
        """Number of cells of the whole grid."""
        return math.prod(self.shape)

    @property
    def coords(self) -> tuple[int, int]:
        """Position of this rank's tile among the tiles."""
        return self.coords_of(self.comm.rank)

    def coords_of(self, rank: int) -> tuple[int, int]:
        """Position of a rank's tile among the tiles."""
        return rank // self.dims[1], rank % self.dims[1]

    def starts(self, axis: int) -> NDArray[np.int64]:
        """First cell of each tile along `axis`, and the number of cells last."""
        cells, tiles = self.shape[axis], self.dims[axis]
        number = np.arange(tiles + 1)
        return number * (cells // tiles) + np.minimum(number, cells % tiles)

    def slices_of(self, rank: int) -> tuple[slice, slice]:
        """The cells of a rank's tile, as slices of the whole grid."""
        first, second = (
            slice(int(self.starts(axis)[place]), int(self.starts(axis)[place + 1]))
            for axis, place in enumerate(self.coords_of(rank))
        )
        return first, second

    @property
    def slices(self) -> tuple[slice, slice]:
        """The cells of this rank's tile, as slices of the whole grid."""
        return self.slices_of(self.comm.rank)

    @property
    def local_shape(self) -> tuple[int, int]:
        """Number of cells of this rank's tile along each axis."""
        first, second = self.slices
        return first.stop - first.start, second.stop - second.start

    @property
    def smallest_tile(self) -> tuple[int, int]:
        """The smallest number of cells that any tile has along each axis."""
        return self.shape[0] // self.dims[0], self.shape[1] // self.dims[1]

    @functools.cached_property
    def neighbors(self) -> tuple[Neighbor, ...]:
        """The tiles that touch this one, corners included, ordered by step."""
        px, py = self.coords
        steps: tuple[Step, ...] = (-1, 0, 1)
        return tuple(
            Neighbor((px + dx) * self.dims[1] + py + dy, (dx, dy))
            for dx in steps
            for dy in steps
            if (dx, dy) != (0, 0) and 0 <= px + dx < self.dims[0] and 0 <= py + dy < self.dims[1]
        )

    # --- the numbering of the unknowns ---

    @property
    def n_local(self) -> int:
        """Number of cells of this rank's tile."""
        return math.prod(self.local_shape)

    @functools.cached_property
    def row_offsets(self) -> NDArray[np.int64]:
        """First row of each rank in tile numbering, and the number of cells last."""
        sizes = np.outer(np.diff(self.starts(0)), np.diff(self.starts(1))).ravel()
        return np.concatenate([[0], np.cumsum(sizes)])

    @property
    def row_offset(self) -> int:
        """First row of this rank in tile numbering."""
        return int(self.row_offsets[self.comm.rank])

    def rows(self, i: ArrayLike, j: ArrayLike) -> NDArray[np.int64]:
        """The rows, in tile numbering, of the cells (i, j) of the grid; -1 outside it."""
        i, j = np.broadcast_arrays(np.asarray(i, np.int64), np.asarray(j, np.int64))
        inside = (i >= 0) & (i < self.shape[0]) & (j >= 0) & (j < self.shape[1])
        i, j = np.where(inside, i, 0), np.where(inside, j, 0)
        starts = self.starts(0), self.starts(1)
        px = np.searchsorted(starts[0], i, side="right") - 1
        py = np.searchsorted(starts[1], j, side="right") - 1
        width = np.diff(starts[1])[py]  # cells per line of the owner's tile
        within = (i - starts[0][px]) * width + j - starts[1][py]
        return np.where(inside, self.row_offsets[px * self.dims[1] + py] + within, -1)

    def local_rows(self, width: int = 0) -> NDArray[np.int64]:
        """Rows of this tile's cells and of `width` layers around it; -1 outside the grid.

        Shape (lx + 2 width, ly + 2 width) for a tile of lx x ly cells, as `halo_exchange` pads it.
        """
        first, second = self.slices
        i = np.arange(first.start - width, first.stop + width)
        j = np.arange(second.start - width, second.stop + width)
        return self.rows(i[:, None], j[None, :])

    def natural_ids(self) -> NDArray[np.int64]:
        """Numbers of this tile's cells in C order of the whole grid, whatever the rank count."""
        first, second = self.slices
        i, j = np.arange(first.start, first.stop), np.arange(second.start, second.stop)
        return i[:, None] * self.shape[1] + j[None, :]

    # --- fields ---

    def centers(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Coordinates x and y of the centres of this tile's cells, each of shape (lx, ly).

        The grid's first corner is the origin.
        """
        x, y = (
            (np.arange(part.start, part.stop) + 0.5) * h
            for part, h in zip(self.slices, self.spacing, strict=True)
        )
        return tuple(np.meshgrid(x, y, indexing="ij"))  # type: ignore[return-value]

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
        _agree(
            self.comm,
            None
            if local.shape[:2] == self.local_shape
            else f"mpigrad.Grid.gather: a field of shape {local.shape} on a tile of "
            f"{self.local_shape} cells (rank {self.comm.rank})",
        )
        thin = tuple(slice(-part.start % stride, None, stride) for part in self.slices)
        piece = np.ascontiguousarray(local[thin])
        if self.comm.rank != 0:
            self.comm.mpi.send(piece, dest=0)
            return None
        shape = tuple(math.ceil(n / stride) for n in self.shape)
        whole = np.empty(shape + local.shape[2:], local.dtype)
        for rank in range(self.comm.size):
            if rank > 0:
                piece = self.comm.mpi.recv(source=rank)
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
        mpi = self.comm.mpi
        problem, field = None, np.empty(0)
        if self.comm.rank == 0:
            field = np.asarray(whole)
            if field.shape[:2] != self.shape:
                problem = (
                    f"mpigrad.Grid.scatter: the field has shape {field.shape}, "
                    f"the grid has {self.shape} cells"
                )
        _agree(self.comm, problem)
        if self.comm.rank != 0:
            return mpi.recv(source=0)
        for rank in range(1, self.comm.size):
            mpi.send(np.ascontiguousarray(field[self.slices_of(rank)]), dest=rank)
        return field[self.slices]


def _agree(comm: Communicator, problem: str | None) -> None:
    """Raise on all ranks what any rank has found wrong."""
    for found in comm.mpi.allgather(problem):
        if found is not None:
            raise ValueError(found)


def _checked(
    shape: Any, spacing: Any, dims: Any, ranks: int
) -> tuple[tuple[int, int], tuple[float, float], tuple[int, int]]:
    """The grid's arguments in their own types, or an error that says what is wrong."""
    try:
        nx, ny = (operator.index(n) for n in shape)
        hx, hy = (float(h) for h in spacing)
    except (TypeError, ValueError):
        raise TypeError(
            "mpigrad.Grid takes shape=(nx, ny), two whole numbers of cells, and "
            f"spacing=(hx, hy), not shape={shape!r}, spacing={spacing!r}"
        ) from None
    if nx < 1 or ny < 1:
        raise ValueError(f"mpigrad.Grid: a grid needs cells along each axis, not {nx} x {ny}")
    if not (hx > 0 and hy > 0 and math.isfinite(hx) and math.isfinite(hy)):
        raise ValueError(f"mpigrad.Grid: spacing must be positive lengths, not ({hx}, {hy})")
    if dims is None:
        return (nx, ny), (hx, hy), choose_dims((nx, ny), ranks)
    try:
        px, py = (operator.index(p) for p in dims)
    except (TypeError, ValueError):
        raise TypeError(f"mpigrad.Grid: dims must be two whole numbers, not {dims!r}") from None
    if px < 1 or py < 1 or px * py != ranks:
        raise ValueError(
            f"mpigrad.Grid: dims ({px}, {py}) make {px * py} tiles for {ranks} ranks; "
            "there is one tile per rank"
        )
    if px > nx or py > ny:
        raise ValueError(
            f"mpigrad.Grid: dims ({px}, {py}) divide {nx} x {ny} cells into tiles without cells; "
            "leave dims out to have them chosen, or use fewer ranks"
        )
    return (nx, ny), (hx, hy), (px, py)
