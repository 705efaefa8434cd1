"""The sparsity pattern of a distributed matrix: built once, on the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.collective_errors import raise_error
from mpigrad.communicator import Communicator, resolve
from mpigrad.grid.grid import Grid
from mpigrad.sparse.matrix.assembly import Assembly, repeated, row_order
from mpigrad.sparse.matrix.ghost_exchange import GhostExchange, _count, _indices, index_array
from mpigrad.sparse.matrix.stencil import Stencil, make_stencil

if TYPE_CHECKING:
    pass

__all__ = ["Pattern", "local_range"]


class Pattern:
    """Where the entries of a row-striped sparse matrix are.

    Rank r owns a contiguous stripe of rows, and one of columns: its entries of a vector that the
    matrix is applied to. The stripes follow each other in the order of the ranks, may differ in
    size and may be empty; those of the columns are those of the rows unless `n_local_columns` says
    otherwise. Building a pattern is collective. It costs sorting and a handshake: build it once and
    keep it.

    Attributes
    ----------
    comm
        Its communicator.
    n_rows, offset, n_local
        Rows on all ranks; first row and number of rows of this rank.
    n_columns, column_offset, n_local_columns
        The same of the columns.
    is_square
        Whether every rank owns the same columns as rows; known on all ranks.
    nnz
        Stored entries of this rank.
    n_given
        Entries that this rank has given.
    stencil
        The `Stencil` of a pattern made by `from_stencil`, else None.
    assembly
        How `assemble` makes stored values of those given; None where they are the same.
    rows, columns
        Local row and global column of each entry, in row order (sorted by row, then column).
    order
        Position, among the stored values, of each entry in row order, shape (nnz,). Values are
        stored in the order in which the entries were given, or in row order where they need
        assembly (see `from_coo`).
    row_starts
        Where each row starts in row order, shape (n_local + 1,).
    diagonal
        Position of each row's diagonal entry among the stored values, -1 where a row has none.
    ghosts
        The exchange of the columns that other ranks own.
    """

    def __init__(
        self,
        rows: Any,
        columns: Any,
        n_local: int,
        comm: Communicator | None = None,
        n_local_columns: int | None = None,
    ) -> None:
        self.comm = resolve(comm)
        self.stencil: Stencil | None = None
        self.assembly: Assembly | Stencil | None = None
        error: Exception | None = None
        i, j = np.zeros(0, np.int64), np.zeros(0, np.int64)
        own = own_columns = 0
        try:
            own = _count(n_local)
            own_columns = own if n_local_columns is None else _count(n_local_columns)
            i, j = _indices(rows, "rows"), _indices(columns, "columns")
            if len(i) != len(j):
                raise ValueError(
                    f"Pattern: {len(i)} rows but {len(j)} columns; give one pair for each entry"
                )
        except (TypeError, ValueError) as problem:
            error = problem
        raise_error(self.comm, error)

        sizes = np.zeros((self.comm.size, 3), np.int64)
        square = n_local_columns is None
        self.comm.mpi.Allgather(np.array([own, own_columns, square], np.int64), sizes)
        total, wide, squares = (int(n) for n in sizes.sum(0))
        offset, column_offset, _ = (int(n) for n in sizes[: self.comm.rank].sum(0))
        if 0 < squares < self.comm.size:
            giver = int(np.argmin(sizes[:, 2]))
            error = ValueError(
                f"Pattern: rank {giver} gives n_local_columns and others do not; give it on all "
                "ranks, or on none where the matrix is square"
            )
        elif total == 0:
            error = ValueError("Pattern: no rank has any row; give n_local > 0 on some rank")
        elif (stray := _outside(i, total)) is not None:
            error = ValueError(
                f"Pattern: row {stray} is outside the matrix of {total} rows (0 to {total - 1}; "
                "rows are global indices, each rank's begin at its offset)"
            )
        elif (stray := _outside(j, wide)) is not None:
            error = ValueError(
                f"Pattern: column {stray} is outside the matrix of {total} rows and {wide} columns "
                f"(0 to {wide - 1})"
            )
        raise_error(self.comm, error)

        self.n_given = len(i)
        mine = bool(np.all((i >= offset) & (i < offset + own)))
        order, ordered = row_order(i - offset, j, wide) if mine else (np.zeros(0, np.int64), False)
        if self.comm.mpi.allreduce(not mine or bool(repeated(i[order], j[order]).any()), MPI.LOR):
            starts = np.concatenate([[0], np.cumsum(sizes[:, 0])])
            self.assembly = Assembly(self.comm, i, j, starts, wide)
            i, j = self.assembly.rows, self.assembly.columns
            order, ordered = np.arange(len(i)), True
        local = i - offset
        self.n_rows, self.offset, self.n_local, self.nnz = total, offset, own, len(i)
        self.n_columns, self.column_offset = wide, column_offset
        self.n_local_columns = own_columns
        self.is_square = bool(np.all(sizes[:, 0] == sizes[:, 1]))
        self.order, self.is_ordered = order, ordered
        self.rows, self.columns = (local, j) if ordered else (local[order], j[order])
        counts = np.bincount(self.rows, minlength=own)
        self.row_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.diagonal = np.full(own, -1, np.int64)
        on_diagonal = self.columns == self.rows + offset
        self.diagonal[self.rows[on_diagonal]] = order[on_diagonal]
        self.ghosts = GhostExchange(own_columns, j, self.comm)
        # The first row, of all ranks, without a diagonal entry; -1 if there is none.
        bare = np.flatnonzero(self.diagonal < 0)
        first = self.comm.mpi.allgather(int(bare[0]) + offset if bare.size else -1)
        self.row_without_diagonal = min((row for row in first if row >= 0), default=-1)
        self._stored_rows = local
        # A solver's messages have a space of their own; making it here is collective.
        self.solver_communicator = _solver_communicator(self.comm)
        self.solver_systems: dict[Any, Any] = {}  # what solvers keep from call to call
        self.derived: dict[Any, Any] = {}  # what other modules make of it once: its transpose, ...

    @classmethod
    def from_coo(
        cls,
        rows: Any,
        columns: Any,
        n_local: int,
        comm: Communicator | None = None,
        n_local_columns: int | None = None,
    ) -> Pattern:
        """The pattern of entries (rows[k], columns[k]).

        Entries may be given on any rank and more than once: finite elements, say, each on the rank
        that has the element. Then `assemble` adds up the contributions to each stored entry on the
        rank that owns its row, and entries are stored in row order. Where each rank gives entries
        of its own rows, each once, they are stored in the order in which they are given.

        Parameters
        ----------
        rows, columns
            Global indices of the entries that this rank gives, shape (n_given,), in any order.
        n_local
            Number of rows that this rank owns; `len(local_range(n))` for an even share of n.
        n_local_columns
            Number of columns that this rank owns; without it the matrix is square, and columns
            are owned as rows are.

        Raises
        ------
        ValueError
            On all ranks, where a row or a column is out of range, or no rank has any row.
        """
        return cls(rows, columns, n_local, comm, n_local_columns)

    @classmethod
    def from_csr(
        cls,
        row_starts: Any,
        columns: Any,
        n_local: int | None = None,
        comm: Communicator | None = None,
        n_local_columns: int | None = None,
        *,
        first_row: int | None = None,
    ) -> Pattern:
        """The pattern of compressed sparse rows, a piece of consecutive rows on each rank.

        Row k of the piece has the columns `columns[row_starts[k]:row_starts[k + 1]]`, in any order.

        Parameters
        ----------
        row_starts, columns
            Where each row of the piece starts, shape (n + 1,), and the global indices of its
            entries' columns, shape (n_given,).
        n_local
            Number of rows that this rank owns; without it those of the piece.
        n_local_columns
            As in `from_coo`.
        first_row
            Global index of the piece's first row, whoever owns it; without it the first that this
            rank owns. Entries of other ranks' rows, or given twice, go where `from_coo` says.

        Raises
        ------
        TypeError, ValueError
            On all ranks, where an argument is no integer, where the row starts do not rise from 0
            to the number of columns, and where `from_coo` raises.
        """
        comm = resolve(comm)
        error, counts, own = None, np.zeros(0, np.int64), 0
        try:
            starts = _indices(row_starts, "row_starts")
            counts = np.diff(starts)
            if len(starts) == 0 or starts[0] != 0 or starts[-1] != np.size(columns):
                raise ValueError(
                    f"Pattern.from_csr: row_starts must begin with 0 and end with the number of "
                    f"columns, {np.size(columns)}"
                )
            if np.any(counts < 0):
                row = int(np.argmax(counts < 0))
                raise ValueError(
                    f"Pattern.from_csr: row_starts fall after row {row}, from {starts[row]} to "
                    f"{starts[row + 1]}"
                )
            if first_row is not None and not isinstance(first_row, int | np.integer):
                raise TypeError(
                    f"Pattern.from_csr: first_row must be an integer, not {first_row!r}"
                )
            own = len(counts) if n_local is None else _count(n_local)
        except (TypeError, ValueError) as problem:
            error = problem
        raise_error(comm, error)
        offset = comm.mpi.scan(own) - own
        first = offset if first_row is None else first_row
        rows = np.repeat(np.arange(first, first + len(counts)), counts)
        return cls(rows, columns, own, comm, n_local_columns)

    @classmethod
    def from_stencil(cls, grid: Grid, offsets: Sequence[Sequence[int]]) -> Pattern:
        """The pattern that couples each cell of a grid to the cells at `offsets` from it.

        Rows are the cells in tile numbering, so that a rank owns its tile's; entries that leave the
        grid are not stored. `assemble` takes one coefficient for each offset and cell, of shape
        (len(offsets), *grid.local_shape); solvers for grids find the `stencil`.

        Parameters
        ----------
        grid
            The grid.
        offsets
            Integers along each axis, the same on all ranks, as in
            ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)).

        Raises
        ------
        TypeError, ValueError
            On all ranks, where offsets are not integers, repeated, or differ between ranks.
        """
        stencil = make_stencil(grid, offsets)
        pattern = cls(*stencil.entries(), grid.n_local, grid.comm)
        pattern.stencil = pattern.assembly = stencil
        return pattern

    def assemble(self, values: Any) -> jax.Array:
        """The stored values: contributions to an entry are added up by its owner (collective).

        A linear map, differentiable in both modes; for how it is done see `Assembly`.

        Parameters
        ----------
        values
            This rank's contributions in the order in which the pattern's entries were given, shape
            (n_given,); for stencils (len(offsets), *grid.local_shape), or a sequence of
            len(offsets) such arrays.

        Returns
        -------
        Array of shape (nnz,).
        """
        if self.assembly is not None:
            return self.assembly(values)
        values = jnp.asarray(values)
        if values.shape != (self.nnz,):
            raise ValueError(
                f"pattern.assemble: values have shape {values.shape} on rank {self.comm.rank}, "
                f"which gave the pattern {self.nnz} entries: give shape ({self.nnz},)"
            )
        return values

    @property
    def stencil_positions(self) -> np.ndarray:
        """Where each stored entry of a stencil stands in its coefficients, flattened: (nnz,)."""
        if self.stencil is None:
            raise ValueError("stencil_positions: the pattern is not one of Pattern.from_stencil")
        return self.stencil.positions

    @functools.cached_property
    def row_index(self) -> jax.Array:
        """Local row of each stored value."""
        return index_array(self._stored_rows)

    @functools.cached_property
    def diagonal_index(self) -> jax.Array:
        return index_array(self.diagonal)

    def __repr__(self) -> str:
        return (
            f"Pattern(n_rows={self.n_rows}, n_columns={self.n_columns}, offset={self.offset}, "
            f"n_local={self.n_local}, nnz={self.nnz})"
        )


def local_range(n: int, comm: Communicator | None = None) -> range:
    """This rank's of n rows that all ranks share evenly; the first ranks have one more."""
    comm = resolve(comm)
    share, rest = divmod(_count(n), comm.size)
    start = comm.rank * share + min(comm.rank, rest)
    return range(start, start + share + (comm.rank < rest))


def _outside(indices: np.ndarray, n: int) -> int | None:
    """The first index that is not one of n."""
    if not len(indices) or (indices.min() >= 0 and indices.max() < n):
        return None
    return int(indices[(indices < 0) | (indices >= n)][0])


@functools.cache
def _solver_communicator(comm: Communicator) -> Any:
    duplicate = comm.mpi.Dup()
    duplicate.Set_errhandler(MPI.ERRORS_ARE_FATAL)  # hypre checks no return code of MPI
    return duplicate
