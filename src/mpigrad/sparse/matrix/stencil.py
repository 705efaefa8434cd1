"""Stencils on the cells of a grid, with the same offsets from every cell."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.collective_errors import raise_error
from mpigrad.grid.grid import Grid
from mpigrad.operations.local_programs import as_array, jit_local

__all__ = ["Stencil", "make_stencil"]


@dataclasses.dataclass(frozen=True)
class Stencil:
    """The coupling of each cell of a grid to the cells at fixed offsets from it.

    `Pattern.from_stencil` makes it. Rows and columns are the cells in tile numbering (`Grid.rows`).
    An entry is stored if both of its cells are in the grid: offset after offset, and for each
    offset in C order of the tile's cells.

    Attributes
    ----------
    grid
        The grid.
    offsets
        Integers along each axis for each offset, as in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)).

    Examples
    --------
    >>> from mpigrad.grid import Grid
    >>> from mpigrad.sparse import Pattern
    >>> grid = Grid((3,), (1.0,))
    >>> stencil = Pattern.from_stencil(grid, [(0,), (1,)]).stencil
    >>> stencil.offsets, stencil.positions.tolist()  # the third cell has no right neighbour
    (((0,), (1,)), [0, 1, 2, 3, 4])
    """

    grid: Grid
    offsets: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def inside(self) -> tuple[tuple[slice, ...], ...]:
        """The cells of this rank's tile whose neighbour at each offset is in the grid."""
        return tuple(
            tuple(
                _part(cells, n, step)
                for cells, n, step in zip(self.grid.slices, self.grid.shape, offset, strict=True)
            )
            for offset in self.offsets
        )

    @functools.cached_property
    def positions(self) -> np.ndarray:
        """The position of each stored entry in the flattened coefficients, shape (nnz,).

        Entry k belongs to offset positions[k] // n_local and cell positions[k] % n_local.
        """
        every = np.arange(len(self.offsets) * self.grid.n_local).reshape(-1, *self.grid.local_shape)
        return np.concatenate([every[k][part].ravel() for k, part in enumerate(self.inside)])

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the global rows and columns of this rank's entries, each of shape (nnz,)."""
        # The rows of all cells that are needed: the tile and the cells that it reaches.
        reach = np.abs(np.array(self.offsets)).max(axis=0)
        tile = list(zip(self.grid.slices, self.grid.shape, reach, strict=True))
        first = [max(cells.start - r, 0) for cells, _, r in tile]
        last = [min(cells.stop + r, n) for cells, n, r in tile]
        numbers = self.grid.rows(*np.ix_(*map(np.arange, first, last)))
        corner = [cells.start - f for (cells, _, _), f in zip(tile, first, strict=True)]

        def of(part: tuple[slice, ...], offset: Sequence[int]) -> np.ndarray:
            moves = np.add(corner, offset)
            where = (slice(s.start + m, s.stop + m) for s, m in zip(part, moves, strict=True))
            return numbers[tuple(where)].ravel()

        here = (0,) * len(first)
        return (
            np.concatenate([of(part, here) for part in self.inside]),
            np.concatenate(list(map(of, self.inside, self.offsets))),
        )

    def __call__(self, coefficients: Any) -> jax.Array:
        """Return the stored entries of coefficients of shape (len(offsets), *grid.local_shape)."""
        coefficients = [as_array(c) for c in coefficients]
        shapes = [c.shape for c in coefficients]
        if shapes != [self.grid.local_shape] * len(self.offsets):
            raise ValueError(
                f"pattern.assemble: coefficients have shapes {shapes} on rank "
                f"{self.grid.comm.rank}. Give one array of the tile's {self.grid.local_shape} "
                f"cells for each of the {len(self.offsets)} offsets."
            )
        # Slices, whose adjoints pad: several times faster than a gather and its scatter.
        ends = tuple(tuple((s.start, s.stop) for s in part) for part in self.inside)
        return _entries(coefficients, ends=ends)


@jit_local(static_argnames=("ends",))
def _entries(coefficients: list[Any], ends: tuple[tuple[tuple[int, int], ...], ...]) -> jax.Array:
    parts = [tuple(slice(*pair) for pair in pairs) for pairs in ends]
    return jnp.concatenate([c[part].ravel() for c, part in zip(coefficients, parts, strict=True)])


def make_stencil(grid: Grid, offsets: Sequence[Sequence[int]]) -> Stencil:
    """Make the stencil of a grid, and check it on all ranks (collective)."""
    if not isinstance(grid, Grid):
        raise TypeError(
            f"Pattern.from_stencil: grid must be a mpigrad.Grid, got {type(grid).__name__}. Make "
            "one with Grid(shape, spacing)."
        )
    if any(grid.periodic):
        raise ValueError(
            "Pattern.from_stencil: the grid must not be periodic, got "
            f"periodic={grid.periodic}. Make the pattern with Pattern.from_coo: "
            "grid.local_rows(1) has the rows around a tile, wrapped around."
        )
    checked, error = (), None
    try:
        checked = _checked(grid, offsets)
    except (TypeError, ValueError) as problem:
        error = problem
    raise_error(grid.comm, error)
    for rank, theirs in enumerate(grid.comm.mpi.allgather(checked)):
        if theirs != checked and error is None:
            error = ValueError(
                "Pattern.from_stencil: the offsets must be the same on all ranks, but rank "
                f"{grid.comm.rank} gives {checked} and rank {rank} gives {theirs}. Give the same "
                "offsets in the same order on every rank."
            )
    raise_error(grid.comm, error)
    return Stencil(grid, checked)


def _checked(grid: Grid, offsets: Any) -> tuple[tuple[int, ...], ...]:
    try:
        found = tuple(tuple(operator.index(step) for step in offset) for offset in offsets)
    except TypeError:
        found = ()
    axes = len(grid.shape)
    if not found or any(len(offset) != axes for offset in found):
        raise TypeError(
            f"Pattern.from_stencil: offsets must be a sequence of {axes} integers each, one for "
            f"each axis of the grid, got {offsets!r}. Give at least one offset."
        )
    if len(set(found)) != len(found):
        twice = next(offset for offset in found if found.count(offset) > 1)
        raise ValueError(
            f"Pattern.from_stencil: offset {twice} is given more than once. Leave out one."
        )
    return found


def _part(cells: slice, n: int, step: int) -> slice:
    """Return the part of a tile's cells, along an axis of n, whose neighbour at `step` is in it."""
    size = cells.stop - cells.start
    start = min(max(0, -step - cells.start), size)
    return slice(start, max(start, min(size, n - step - cells.start)))
