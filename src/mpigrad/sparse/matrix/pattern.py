"""The sparsity pattern of a distributed matrix, built once on the host."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from mpigrad.collective_errors import raise_error
from mpigrad.communicator import Communicator, resolve
from mpigrad.extend import as_array
from mpigrad.grid import Grid
from mpigrad.sparse.matrix.assembly import (
    Assembly,
    ElementAssembly,
    Stencil,
    element_entries,
    make_stencil,
    repeated,
    row_order,
)
from mpigrad.sparse.matrix.ghost_exchange import GhostExchange, _count, _indices, index_array

__all__ = [
    "Pattern",
    "cached_plan",
    "local_range",
    "same_communicator",
]

# ---- The sparsity pattern of a distributed matrix, built once on the host ----


class Pattern:
    """The positions of the entries of a sparse matrix that is striped by rows over the ranks.

    Rank r owns a contiguous stripe of rows, and a stripe of columns: its entries of a vector that
    the matrix is applied to. The stripes follow each other in the order of the ranks, may differ in
    size and may be empty. Columns are divided as rows are, unless `n_local_columns` is given.
    Building a pattern is collective. It costs sorting and a handshake: build it once and keep it.

    Parameters
    ----------
    rows, columns, n_local, comm, n_local_columns
        See `from_coo`.

    Attributes
    ----------
    comm
        The communicator.
    n_rows, offset, n_local
        The number of rows on all ranks, and the first row and number of rows of this rank.
    n_columns, column_offset, n_local_columns
        The same for the columns.
    is_square
        True if every rank owns the same columns as rows. It is the same on all ranks.
    nnz
        The number of stored entries of this rank.
    n_given
        The number of entries that this rank has given.
    stencil
        The `Stencil` of a pattern made by `from_stencil`, else None.
    colours
        The colours of this rank's columns for `sparse_jacobian`, or None if they are not known.
    assembly
        The map from given to stored values, or None if they are the same.
    columns
        The global column of each entry, in row order (sorted by row, then column).
    row_starts
        The start of each row in row order, shape (n_local + 1,).
    diagonal
        The position of each row's diagonal entry among the stored values, or -1 without one.
    ghosts
        The `GhostExchange` of the columns that other ranks own.

    Examples
    --------
    >>> from mpigrad.sparse import Pattern
    >>> pattern = Pattern.from_coo([0, 0, 1], [0, 1, 1], n_local=2)
    >>> pattern
    Pattern(n_rows=2, n_columns=2, offset=0, n_local=2, nnz=3)
    >>> pattern.row_starts.tolist(), pattern.diagonal.tolist()
    ([0, 2, 3], [0, 2])
    """

    def __init__(
        self,
        rows: Any,
        columns: Any,
        n_local: int,
        comm: Communicator | None = None,
        *,
        n_local_columns: int | None = None,
    ) -> None:
        self.comm = resolve(comm)
        self.stencil: Stencil | None = None
        self.colours: np.ndarray | None = None
        self.assembly: Assembly | ElementAssembly | Stencil | None = None
        error: Exception | None = None
        i, j = np.zeros(0, np.int64), np.zeros(0, np.int64)
        own_rows = own_columns = 0
        try:
            own_rows = own_columns = _count(n_local, "Pattern")
            if n_local_columns is not None:
                own_columns = _count(n_local_columns, "Pattern", "n_local_columns")
            i, j = _indices(rows, "Pattern", "rows"), _indices(columns, "Pattern", "columns")
            if len(i) != len(j):
                raise ValueError(
                    f"Pattern: rows and columns must have the same length, got {len(i)} and "
                    f"{len(j)}. Give one pair for each entry."
                )
        except (TypeError, ValueError) as problem:
            error = problem
        raise_error(self.comm, error)

        sizes = np.zeros((self.comm.size, 3), np.int64)
        square = n_local_columns is None
        self.comm.mpi.Allgather(np.array([own_rows, own_columns, square], np.int64), sizes)
        total, wide, squares = (int(n) for n in sizes.sum(0))
        offset, column_offset, _ = (int(n) for n in sizes[: self.comm.rank].sum(0))
        if 0 < squares < self.comm.size:
            giver = int(np.argmin(sizes[:, 2]))
            error = ValueError(
                f"Pattern: rank {giver} gives n_local_columns and others do not. Give it on all "
                "ranks, or on none if the matrix is square."
            )
        elif total == 0:
            error = ValueError("Pattern: no rank has any row. Give n_local > 0 on some rank.")
        elif (stray := _outside(i, total)) is not None:
            error = ValueError(
                f"Pattern: row {stray} is outside the matrix of {total} rows (0 to {total - 1}). "
                "Give global rows: a rank's own rows start at its offset."
            )
        elif (stray := _outside(j, wide)) is not None:
            error = ValueError(
                f"Pattern: column {stray} is outside the matrix of {total} rows and {wide} columns "
                f"(0 to {wide - 1}). Give global columns."
            )
        raise_error(self.comm, error)

        self.n_given = len(i)
        is_local = bool(np.all((i >= offset) & (i < offset + own_rows)))
        order = row_order(i - offset, j, wide) if is_local else None
        sorted_entries = (i, j) if order is None else (i[order], j[order])
        if self.comm.mpi.allreduce(not is_local or bool(repeated(*sorted_entries).any()), MPI.LOR):
            starts = np.concatenate([[0], np.cumsum(sizes[:, 0])])
            self.assembly = Assembly(self.comm, i, j, starts, wide)
            order, sorted_entries = None, self.assembly.pop_entries()
        i, j = sorted_entries
        self.n_rows, self.offset, self.n_local, self.nnz = total, offset, own_rows, len(i)
        self.n_columns, self.column_offset = wide, column_offset
        self.n_local_columns = own_columns
        self.is_square = bool(np.all(sizes[:, 0] == sizes[:, 1]))
        self._order, self.is_ordered = order, order is None
        self.columns = np.array(j)
        counts = np.bincount(i - offset, minlength=own_rows)
        self.row_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.diagonal = np.full(own_rows, -1, np.int64)
        on_diagonal = np.flatnonzero(i == j)
        self.diagonal[i[on_diagonal] - offset] = (
            on_diagonal if order is None else order[on_diagonal]
        )
        remote = (j < column_offset) | (j >= column_offset + own_columns)
        self.ghosts = GhostExchange(own_columns, j[remote], self.comm)
        # The first row on any rank without a diagonal entry, or -1.
        bare = np.flatnonzero(self.diagonal < 0)
        first = self.comm.mpi.allgather(int(bare[0]) + offset if bare.size else -1)
        self.row_without_diagonal = min((row for row in first if row >= 0), default=-1)
        # Solvers have a communicator of their own. Making it here is collective.
        self.solver_communicator = _solver_communicator(self.comm)
        # For BoomerAMG(near_null=True): vectors that the matrix nearly maps to zero, other than
        # constants of each kind of unknown, shape (n_local, k).
        self.near_null: np.ndarray | None = None
        # This rank's rows of each field, which follow each other, if `Blocks` were merged.
        self.fields: tuple[int, ...] = ()
        self.solver_systems: dict[Any, Any] = {}  # data of solvers
        self.derived: dict[Any, Any] = {}  # data of other modules, such as the transpose

    @classmethod
    def from_coo(
        cls,
        rows: Any,
        columns: Any,
        n_local: int,
        comm: Communicator | None = None,
        *,
        n_local_columns: int | None = None,
    ) -> Pattern:
        """Make the pattern of entries (rows[k], columns[k]) (collective).

        Entries may be given on any rank and more than once: finite elements, for instance, each on
        the rank that has the element. Then `assemble` adds up the contributions to each stored
        entry on the rank that owns its row, and entries are stored in row order. If each rank gives
        entries of its own rows only, each once, they are stored in the order given.

        Parameters
        ----------
        rows, columns
            The global indices of the entries that this rank gives, shape (n_given,), in any order.
        n_local
            The number of rows that this rank owns. `len(local_range(n))` is an even share of n.
        comm
            The communicator over whose ranks the rows are distributed. None: the default
            communicator.
        n_local_columns
            The number of columns that this rank owns. Default: those of the rows, for a square
            matrix.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if an index is not an integer or out of range, or no rank has any row.
        """
        return cls(rows, columns, n_local, comm, n_local_columns=n_local_columns)

    @classmethod
    def from_csr(
        cls,
        row_starts: Any,
        columns: Any,
        n_local: int | None = None,
        comm: Communicator | None = None,
        *,
        n_local_columns: int | None = None,
        first_row: int | None = None,
    ) -> Pattern:
        """Make the pattern of compressed sparse rows, consecutive ones on each rank (collective).

        Row k of this rank's piece has the columns `columns[row_starts[k]:row_starts[k + 1]]`, in
        any order.

        Parameters
        ----------
        row_starts, columns
            The start of each row of the piece, shape (n + 1,), and the global column of each entry,
            shape (n_given,).
        n_local
            The number of rows that this rank owns. Default: the rows of the piece.
        comm, n_local_columns
            As in `from_coo`.
        first_row
            The global index of the piece's first row, which any rank may own. Default: the first
            row that this rank owns. Entries of other ranks' rows, or given twice, are assembled as
            `from_coo` describes.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if an argument is not an integer, if the row starts do not rise from 0 to
            the number of columns, and if `from_coo` raises.
        """
        comm = resolve(comm)
        error, counts, own_rows = None, np.zeros(0, np.int64), 0
        try:
            starts = _indices(row_starts, "Pattern.from_csr", "row_starts")
            counts = np.diff(starts)
            if len(starts) == 0 or starts[0] != 0 or starts[-1] != np.size(columns):
                raise ValueError(
                    "Pattern.from_csr: row_starts must begin with 0 and end with the number of "
                    f"columns, {np.size(columns)}, got {starts[:1].tolist()} and "
                    f"{starts[-1:].tolist()}. Give the starts of this rank's rows, counted from 0."
                )
            if np.any(counts < 0):
                row = int(np.argmax(counts < 0))
                raise ValueError(
                    f"Pattern.from_csr: row_starts must not decrease, but fall after row {row} "
                    f"from {starts[row]} to {starts[row + 1]}. Give the start of each row in order."
                )
            if first_row is not None and not isinstance(first_row, int | np.integer):
                raise TypeError(
                    f"Pattern.from_csr: first_row must be an integer, got {first_row!r}. Give the "
                    "global index of the first row."
                )
            own_rows = len(counts) if n_local is None else _count(n_local, "Pattern.from_csr")
        except (TypeError, ValueError) as problem:
            error = problem
        raise_error(comm, error)
        offset = comm.mpi.scan(own_rows) - own_rows
        first = offset if first_row is None else first_row
        rows = np.repeat(np.arange(first, first + len(counts)), counts)
        return cls(rows, columns, own_rows, comm, n_local_columns=n_local_columns)

    @classmethod
    def from_elements(
        cls, unknowns: Any, n_local: int, comm: Communicator | None = None
    ) -> Pattern:
        """Make the pattern of the sum of element matrices (collective).

        Row i has an entry in column j if an element has both unknowns. `assemble` takes the element
        matrices of this rank, shape (n_elements, k, k). The pattern is the same as that of
        `from_coo` with k * k pairs of indices for each element, and is made in a fraction of the
        time and memory.

        Parameters
        ----------
        unknowns
            The global index of each unknown of each element that this rank has, shape
            (n_elements, k). Any rank may own them.
        n_local, comm
            As in `from_coo`.

        Raises
        ------
        ValueError
            On all ranks, if `unknowns` is not an integer array with two axes, if an index is out of
            range, or if there are more entries on a rank than 32 bits can count.

        Examples
        --------
        Two intervals with the unknowns 0, 1 and 1, 2:

        >>> import numpy as np
        >>> from mpigrad.sparse import Matrix, Pattern
        >>> pattern = Pattern.from_elements([[0, 1], [1, 2]], n_local=3)
        >>> stiffness = np.array([[1.0, -1.0], [-1.0, 1.0]])
        >>> A = Matrix.assemble(pattern, np.stack([stiffness, 2 * stiffness]))
        >>> A.to_scipy().toarray().tolist()
        [[1.0, -1.0, 0.0], [-1.0, 3.0, -2.0], [0.0, -2.0, 2.0]]
        """
        comm = resolve(comm)
        error, nothing = None, np.zeros(0, np.int64)
        rows, columns, place = nothing, nothing, np.zeros((0, 0, 0), np.int32)
        try:
            elements = np.asarray(unknowns)
            integers = elements.size == 0 or np.issubdtype(elements.dtype, np.integer)
            if elements.ndim != 2 or not integers:
                raise ValueError(
                    "Pattern.from_elements: expected integers of shape (n_elements, k), got "
                    f"{elements.dtype} of shape {elements.shape}. Give a row of global indices for "
                    "each element."
                )
            rows, columns, place = element_entries(elements.astype(np.int64, copy=False))
        except ValueError as problem:
            error = problem
        raise_error(comm, error)
        pattern = cls(rows, columns, n_local, comm)
        assembly = pattern.assembly
        assert assembly is None or isinstance(assembly, Assembly)
        pattern.n_given = place.size
        pattern.assembly = ElementAssembly(place, len(rows), assembly, comm.rank)
        return pattern

    @classmethod
    def from_stencil(cls, grid: Grid, offsets: Sequence[Sequence[int]]) -> Pattern:
        """Make the pattern that couples each cell of a grid to the cells at `offsets` from it.

        Rows are the cells in tile numbering, so that a rank owns the cells of its tile. Entries
        that leave the grid are not stored. `assemble` takes one coefficient for each offset and
        cell, of shape (len(offsets), *grid.local_shape). Solvers for grids use `stencil`.

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
            On all ranks, if offsets are not integers, repeated, or differ between ranks.
        """
        stencil = make_stencil(grid, offsets)
        pattern = cls(*stencil.entries(), grid.n_local, grid.comm)
        pattern.stencil = pattern.assembly = stencil
        return pattern

    def assemble(self, values: Any) -> jax.Array:
        """Add up the contributions to each stored entry on the rank that owns it (collective).

        A linear map, differentiable in both modes, in a fixed order of additions.

        Parameters
        ----------
        values
            This rank's contributions in the order in which the pattern's entries were given, shape
            (n_given,). For elements shape (n_elements, k, k). For stencils shape
            (len(offsets), *grid.local_shape), or a sequence of len(offsets) arrays of shape
            grid.local_shape.

        Returns
        -------
        The stored values, an array of shape (nnz,).
        """
        if self.assembly is not None:
            return self.assembly(values)
        values = as_array(values)
        if values.shape != (self.nnz,):
            raise ValueError(
                f"pattern.assemble: values have shape {values.shape} on rank {self.comm.rank}, "
                f"which gave the pattern {self.nnz} entries. Give shape ({self.nnz},)."
            )
        return values

    def with_own_solvers(self) -> Pattern:
        """Return the same pattern for another matrix, whose solvers keep data of their own."""
        twin = copy.copy(self)
        twin.solver_systems, twin.derived = {}, {}
        return twin

    @property
    def stencil_positions(self) -> np.ndarray:
        """Position of each stored entry in a stencil's flattened coefficients, shape (nnz,)."""
        if self.stencil is None:
            raise ValueError(
                "pattern.stencil_positions: the pattern was not made by Pattern.from_stencil. "
                "Make it with that."
            )
        return self.stencil.positions

    @property
    def rows(self) -> np.ndarray:
        """The local row of each entry, in row order, shape (nnz,). It is made in each call."""
        return np.repeat(np.arange(self.n_local), np.diff(self.row_starts))

    @property
    def order(self) -> np.ndarray:
        """The position, among the stored values, of each entry in row order, shape (nnz,).

        Values are stored in the order in which the entries were given, or in row order if they need
        assembly (see `from_coo`).
        """
        return np.arange(self.nnz) if self._order is None else self._order

    @functools.cached_property
    def diagonal_index(self) -> jax.Array:
        """`diagonal` as an array on the device."""
        return index_array(self.diagonal)

    def __repr__(self) -> str:
        return (
            f"Pattern(n_rows={self.n_rows}, n_columns={self.n_columns}, offset={self.offset}, "
            f"n_local={self.n_local}, nnz={self.nnz})"
        )


def local_range(n: int, comm: Communicator | None = None) -> range:
    """Return this rank's range of n rows that are shared evenly.

    If n is not a multiple of the number of ranks, the first ranks have one row more.

    Parameters
    ----------
    n
        The number of rows of all ranks.
    comm
        The communicator. None: the default communicator.

    Examples
    --------
    >>> from mpigrad.sparse import local_range
    >>> local_range(10)  # on one rank
    range(0, 10)
    """
    comm = resolve(comm)
    share, rest = divmod(_count(n, "local_range", "n"), comm.size)
    start = comm.rank * share + min(comm.rank, rest)
    return range(start, start + share + (comm.rank < rest))


def _outside(indices: np.ndarray, n: int) -> int | None:
    """Return the first index outside 0 to n - 1, or None."""
    if not len(indices) or (indices.min() >= 0 and indices.max() < n):
        return None
    return int(indices[(indices < 0) | (indices >= n)][0])


@functools.cache
def _solver_communicator(comm: Communicator) -> Any:
    """Return the communicator of solvers, one for each communicator."""
    duplicate = comm.mpi.Dup()
    duplicate.Set_errhandler(MPI.ERRORS_ARE_FATAL)  # hypre checks no return code of MPI
    return duplicate


# ---- Plans of operations on two patterns, kept as long as both patterns live ----


def same_communicator(name: str, a: Pattern, b: Pattern) -> None:
    """Raise an error, the same on every rank, if the patterns have different communicators."""
    if a.comm.slot != b.comm.slot:
        raise ValueError(
            f"{name}: the matrices have different communicators (of {a.comm.size} and "
            f"{b.comm.size} ranks). Make both patterns with the same `comm`."
        )


def cached_plan(
    name: str, a: Pattern, b: Pattern, check: Callable[[], str], make: Callable[[], Any]
) -> Any:
    """Return the plan that `make` gives for two patterns, made once (collective when it is made).

    `check` returns the text of an error on this rank, which all ranks raise, or an empty string. A
    plan lives as long as both patterns. The caller has both, so all ranks find it or none does.
    """
    plans = a.derived.setdefault(name, weakref.WeakKeyDictionary())
    if b not in plans:
        same_communicator(name, a, b)
        fault = check()
        raise_error(a.comm, ValueError(f"{name}: {fault}") if fault else None)
        plans[b] = make()
    return plans[b]
