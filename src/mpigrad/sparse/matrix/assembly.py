"""Assembly of entries that are given on any rank, of element matrices, and of stencils."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.collective_errors import raise_error
from mpigrad.communicator import BlockingCall, Communicator
from mpigrad.extend import as_array, jit_local, keep_in_order
from mpigrad.grid import Grid
from mpigrad.operations import neighbor_alltoallv
from mpigrad.sparse.matrix.ghost_exchange import GhostExchange, _tell_owners, ghost_values
from mpigrad.sparse.matrix.multilinear import (
    TrilinearContraction,
    add_up,
    multiply_patterns,
    positions,
    select,
)

__all__ = [
    "Assembly",
    "ElementAssembly",
    "Selection",
    "Stencil",
    "element_entries",
    "make_stencil",
    "repeated",
    "row_order",
]

# ---- Assembly of entries that are given on any rank, any number of times ----


def row_order(rows: np.ndarray, columns: np.ndarray, n_columns: int) -> np.ndarray | None:
    """Return the permutation to row order, stable, or None if it is the identity."""
    next_row = rows[1:] > rows[:-1]
    if bool(np.all(next_row | ((rows[1:] == rows[:-1]) & (columns[1:] >= columns[:-1])))):
        return None
    if (int(rows.max()) + 1) * n_columns < 2**63:
        return np.argsort(rows * n_columns + columns, kind="stable")
    return np.lexsort((columns, rows))


def repeated(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return True for each entry in row order, from the second on, that equals the one before."""
    return (rows[1:] == rows[:-1]) & (columns[1:] == columns[:-1])


class Assembly:
    """The sum of the contributions of all ranks to each stored entry.

    A linear map from this rank's contributions (n_given,) to its stored entries (nnz,). It sends
    one message to each rank that owns rows of this rank's contributions, and adds in a fixed order
    (the rank's own contributions as given, those of the other ranks by rank, and these two sums),
    so that sums are the same to the bit in every run. Its adjoint sends each contribution the
    cotangent of its entry. Making it is collective.

    Parameters
    ----------
    rows, columns
        The global indices of the contributions, shape (n_given,).
    starts
        The first row of each rank, followed by the number of rows.
    n_columns
        The number of columns of all ranks.

    Attributes
    ----------
    n_entries
        The number of stored entries of this rank, nnz.
    position
        The stored entry to which each contribution is added, and nnz + k for contribution k that
        this rank sends, shape (n_given,).
    neighbors
        The ranks to which this rank sends contributions, or from which it receives them.
    """

    def __init__(
        self,
        comm: Communicator,
        rows: np.ndarray,
        columns: np.ndarray,
        starts: np.ndarray,
        n_columns: int,
    ) -> None:
        self.comm, self.n_given = comm, len(rows)
        # Empty stripes share their start with the next one. `right` finds the rank that owns it.
        owners = np.searchsorted(starts, rows, side="right") - 1
        leaving = np.flatnonzero(owners != comm.rank)
        leaving = leaving[np.argsort(owners[leaving], kind="stable")]
        to = {int(rank): leaving[owners[leaving] == rank] for rank in np.unique(owners[leaving])}
        with BlockingCall("the making of a Pattern"):
            come = _tell_owners(
                comm, {rank: np.concatenate([rows[k], columns[k]]) for rank, k in to.items()}
            )
        comm.mpi.Barrier()  # no rank starts another handshake while one still probes
        self.neighbors = tuple(sorted({*to, *come}))
        self.sendcounts = tuple(len(to.get(rank, ())) for rank in self.neighbors)
        self.recvcounts = tuple(len(come.get(rank, ())) // 2 for rank in self.neighbors)
        staying = np.flatnonzero(owners == comm.rank)

        received = [come[rank].reshape(2, -1) for rank in self.neighbors if rank in come]
        local = np.stack([rows[staying], columns[staying]])
        i, j = np.concatenate([local, *received], axis=1)
        permutation = row_order(i - starts[comm.rank], j, n_columns)
        order = slice(None) if permutation is None else permutation
        first = np.concatenate([[True], ~repeated(i[order], j[order])])[: len(i)]
        self._entries: tuple[np.ndarray, np.ndarray] | None = (i[order][first], j[order][first])
        target = np.empty(len(i), np.int64)
        target[order] = np.cumsum(first) - 1
        self.n_entries = n_entries = int(np.count_nonzero(first))
        position = np.empty(self.n_given, np.int64)
        position[staying] = target[: len(staying)]
        position[leaving] = n_entries + np.arange(len(leaving))
        self.position = positions(position)
        # In the native library, because they would be constants of each compiled program.
        self._received = TrilinearContraction.selection(target[len(staying) :], n_entries)

    def pop_entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the global rows and columns of the stored entries, and keep them no longer."""
        entries, self._entries = self._entries, None
        assert entries is not None
        return entries

    def selection(self, position: np.ndarray) -> TrilinearContraction:
        """Return the selection of stored entries and of sent ones at these positions."""
        return TrilinearContraction.selection(position, self.n_entries + sum(self.sendcounts))

    @functools.cached_property
    def _given(self) -> TrilinearContraction:
        return self.selection(self.position)

    def __call__(self, values: Any) -> jax.Array:
        values = as_array(values)
        if values.shape != (self.n_given,):
            raise ValueError(
                f"pattern.assemble: values have shape {values.shape} on rank {self.comm.rank}, "
                f"which gave the pattern {self.n_given} entries. Give shape ({self.n_given},)."
            )
        return self.add_up(self._given, values)

    def add_up(self, selection: TrilinearContraction, values: jax.Array) -> jax.Array:
        """Return the sums at stored entries of all ranks' values in a `selection`."""
        if not self.neighbors:
            return add_up(selection, values, ())
        sums, sent = add_up(selection, values, (), self.n_entries)
        # A rank that sends nothing would wait for the others first, and add up afterwards.
        sums = keep_in_order(sums)
        received = neighbor_alltoallv(
            sent, self.neighbors, self.sendcounts, self.recvcounts, self.comm
        )
        return sums + add_up(self._received, received)


# ---- Entries of element matrices: their pattern without a pair of indices for each
# contribution


def element_entries(unknowns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a rank's entries, each once, and the entry of each contribution.

    Parameters
    ----------
    unknowns
        The global index of each unknown of each element, shape (n_elements, k). An unknown may
        occur twice in an element.

    Returns
    -------
    The global rows and columns of the entries, in row order, and for each contribution of the
    element matrices, shape (n_elements, k, k), the entry to which it is added.
    """
    n, k = unknowns.shape
    numbers, local = np.unique(unknowns, return_inverse=True)
    local = local.reshape(n, k)
    order = np.argsort(local, axis=1, kind="stable")
    local = np.take_along_axis(local, order, 1)
    # The pattern is that of a product: (unknowns x elements) times (elements x unknowns).
    by_unknown = np.argsort(local, axis=None, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(local.ravel(), minlength=len(numbers)))])
    elements = np.arange(n + 1) * k
    row_starts, columns, target = multiply_patterns(
        starts, by_unknown // k, elements, local.ravel()
    )
    place = np.empty((n * k, k), np.int32)
    place[by_unknown] = target.reshape(-1, k)
    back = np.argsort(order, axis=1)
    place = np.take_along_axis(place.reshape(n, k, k), back[:, :, None], 1)
    place = np.take_along_axis(place, back[:, None, :], 2)
    rows = np.repeat(numbers, np.diff(row_starts))
    return rows, numbers[columns], place


class ElementAssembly:
    """The sum of element matrices (n_elements, k, k) at each stored entry of a pattern.

    This rank's contributions to an entry are added up first, in the order of the elements, in one
    pass for stored entries and for sums that are sent. A sum goes to the rank that owns the row, as
    in `Assembly`.

    Parameters
    ----------
    place, n_entries
        See `element_entries`.
    assembly
        The assembly of these entries, or None if this rank owns all of their rows.
    """

    def __init__(self, place: np.ndarray, n_entries: int, assembly: Assembly | None, rank: int):
        self.shape, self.rank, self.assembly = place.shape, rank, assembly
        self._selection = (
            TrilinearContraction.selection(place.ravel(), n_entries)
            if assembly is None
            else assembly.selection(assembly.position[place.ravel()])
        )

    def __call__(self, values: Any) -> jax.Array:
        values = as_array(values)
        flat = (int(np.prod(self.shape)),)
        if values.shape not in (self.shape, flat):
            raise ValueError(
                f"pattern.assemble: values have shape {values.shape} on rank {self.rank}, which "
                f"gave the pattern {self.shape[0]} elements of {self.shape[1]} unknowns. Give "
                f"shape {self.shape}."
            )
        if self.assembly is None:
            return add_up(self._selection, values, ())
        return self.assembly.add_up(self._selection, values)


# ---- Stencils on the cells of a grid, with the same offsets from every cell ----


class Selection:
    """Entries of a distributed vector at positions among own and ghost entries, and their sums.

    The nodes of this rank's cells are an example: each node belongs to several cells.

    Parameters
    ----------
    ghosts
        The exchange that receives the ghost entries.
    positions
        Positions in the result of `ghosts.local_and_ghost`, shape (m,), repeated or not.

    Raises
    ------
    TypeError, ValueError
        On this rank: if the positions are not integers with one axis, or are out of range.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.sparse import GhostExchange, Selection
    >>> ghosts = GhostExchange(3, needed=[0, 1, 1, 2])
    >>> selection = Selection(ghosts, ghosts.position)  # two segments with two ends each
    >>> selection(jnp.array([1.0, 2.0, 3.0]))
    Array([1., 2., 2., 3.], dtype=float32)
    >>> selection.add_up(jnp.ones(4))
    Array([1., 2., 1.], dtype=float32)
    """

    def __init__(self, ghosts: GhostExchange, positions: Any) -> None:
        self.ghosts = ghosts
        places, n = np.asarray(positions), ghosts.n_local + len(ghosts.ghosts)
        if places.ndim != 1 or places.dtype.kind not in "iu":
            raise TypeError(
                "Selection: expected positions as an array of integers with one axis, got "
                f"{places.dtype}{list(places.shape)} on rank {ghosts.comm.rank}. Flatten them."
            )
        if len(places) and not 0 <= places.min() <= places.max() < n:
            raise ValueError(
                f"Selection: positions must lie in 0 to {n - 1}, the own and ghost entries of rank "
                f"{ghosts.comm.rank}, got {places.min()} to {places.max()}. Use ghosts.position."
            )
        self._map = TrilinearContraction.selection(places, n)

    def __call__(self, x: Any, lead: tuple[int, ...] | None = None) -> jax.Array:
        """Return the entries of own values `x`, shape (n_local, ...) (collective).

        Parameters
        ----------
        x
            This rank's part of the vector.
        lead
            The first axes of the result. Default: (m,).
        """
        return select(self._map, x, ghost_values(self.ghosts, x), lead)

    def add_up(self, values: Any, tail: tuple[int, ...] | None = None) -> jax.Array:
        """Return the adjoint: the sum of values at each own entry, over all ranks (collective).

        Parameters
        ----------
        values
            Values at the positions, shape (m, ...), or an array with as many entries.
        tail
            The last axes of the result. Default: those of `values`.
        """
        values, n = as_array(values), self._map.sizes[-1]
        rest = values.shape[1:] if tail is None else tail
        if values.size != n * math.prod(rest):
            raise ValueError(
                f"Selection.add_up: expected {n} values of shape {rest} on rank "
                f"{self.ghosts.comm.rank}, got an array of shape {values.shape}. Give one for each "
                "position."
            )
        return self.ghosts.accumulate(add_up(self._map, values, tail))


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
        stencil = tuple(tuple(operator.index(step) for step in offset) for offset in offsets)
    except TypeError:
        stencil = ()
    axes = len(grid.shape)
    if not stencil or any(len(offset) != axes for offset in stencil):
        raise TypeError(
            f"Pattern.from_stencil: offsets must be a sequence of {axes} integers each, one for "
            f"each axis of the grid, got {offsets!r}. Give at least one offset."
        )
    if len(set(stencil)) != len(stencil):
        twice = next(offset for offset in stencil if stencil.count(offset) > 1)
        raise ValueError(
            f"Pattern.from_stencil: offset {twice} is given more than once. Leave out one."
        )
    return stencil


def _part(cells: slice, n: int, step: int) -> slice:
    """Return the part of a tile's cells, along an axis of n, whose neighbour at `step` is in it."""
    size = cells.stop - cells.start
    start = min(max(0, -step - cells.start), size)
    return slice(start, max(start, min(size, n - step - cells.start)))
