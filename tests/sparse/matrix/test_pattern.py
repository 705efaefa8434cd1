import numpy as np
import pytest
from systems import grid_system, stripes

from helpers import found_on
from mpigrad.sparse import Pattern, local_range


def test_order_of_rows(comm):
    system = grid_system(comm)
    p = system.pattern
    given = (system.rows[system.entries] - p.offset, system.columns[system.entries])
    np.testing.assert_array_equal(p.rows, given[0][p.order])
    np.testing.assert_array_equal(p.columns, given[1][p.order])
    key = p.rows * p.n_rows + p.columns
    assert np.all(np.diff(key) > 0)
    assert (p.n_rows, p.nnz, len(p.row_starts)) == (30, len(given[0]), p.n_local + 1)
    for i in range(p.n_local):
        row = slice(p.row_starts[i], p.row_starts[i + 1])
        assert np.all(p.rows[row] == i)
        assert given[1][p.diagonal[i]] == i + p.offset == given[0][p.diagonal[i]] + p.offset
    assert p.row_without_diagonal == -1


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shift", [0, 1])
def test_compressed_rows(comm, shift):
    """This rank's rows, or those of the next one: patterns and sums as by `from_coo`."""
    counts = [3 * (rank != 1 or comm.size < 3) for rank in range(comm.size)]
    whose = (comm.rank + shift) % comm.size
    n, first, length = sum(counts), sum(counts[:whose]), counts[whose]
    starts = np.concatenate([[0], np.cumsum(np.arange(length) + 2)])
    columns = np.random.default_rng(whose).integers(0, n, starts[-1])  # some of them twice
    rows = np.repeat(np.arange(first, first + length), np.diff(starts))
    where = {"first_row": first} if shift else {}
    got = Pattern.from_csr(starts, columns, counts[comm.rank], comm, **where)
    expected = Pattern.from_coo(rows, columns, counts[comm.rank], comm)
    for name in ("rows", "columns", "row_starts", "diagonal", "order"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    given = np.arange(1.0, len(rows) + 1)
    np.testing.assert_array_equal(got.assemble(given), expected.assemble(given))
    assert comm.mpi.allreduce(float(got.assemble(given).sum())) == comm.mpi.allreduce(given.sum())
    if not shift:
        assert Pattern.from_csr(starts, columns, comm=comm).n_local == length


@pytest.mark.parametrize(
    ("starts", "error", "message"),
    [
        ([0, 1], ValueError, "begin with 0 and end with the number of columns, 2"),
        ([1, 2], ValueError, "begin with 0 and end with the number of columns, 2"),
        ([], ValueError, "begin with 0 and end with the number of columns, 2"),
        ([0, 3, 2], ValueError, "fall after row 1 from 3 to 2"),
        ([0.0, 2.0], TypeError, "row_starts must be a one-dimensional array of integers"),
    ],
)
def test_wrong_compressed_rows_are_an_error_on_all(comm, starts, error, message):
    at_fault = comm.size - 1
    given = starts if comm.rank == at_fault else [0, 2]
    with pytest.raises(error, match=found_on(comm, at_fault, message)):
        Pattern.from_csr(given, [0, 0], comm=comm)
    first = "0" if comm.rank == at_fault else None
    with pytest.raises(TypeError, match=found_on(comm, at_fault, "first_row must be an integer")):
        Pattern.from_csr([0, 2], [0, 0], comm=comm, first_row=first)  # type: ignore[arg-type]


def test_rows_in_order_are_left_alone(comm):
    n = 3
    rows = np.repeat(np.arange(n), 2) + n * comm.rank
    columns = np.tile([0, n * comm.size - 1], n)
    if n * comm.size > 1:
        pattern = Pattern.from_coo(rows, columns, n, comm)
        assert pattern.is_ordered
        np.testing.assert_array_equal(pattern.order, np.arange(2 * n))


def test_rectangular(comm):
    """64-bit columns: more than fit a key of row and column in 64 bits."""
    n, columns = 20, 2**59
    rows = np.arange(n)[::-1] + n * comm.rank
    pattern = Pattern.from_coo(rows, rows + columns, n, comm, n_local_columns=columns + n)
    assert (pattern.n_rows, pattern.n_columns) == (n * comm.size, (columns + n) * comm.size)
    assert (pattern.offset, pattern.column_offset) == (n * comm.rank, (columns + n) * comm.rank)
    np.testing.assert_array_equal(pattern.order, np.arange(n)[::-1])
    np.testing.assert_array_equal(pattern.columns, np.sort(rows) + columns)
    assert not pattern.is_square
    assert pattern.row_without_diagonal == 0


def test_first_row_without_diagonal_is_known_everywhere(comm):
    rows = np.arange(2) + 2 * comm.rank
    columns = rows.copy()
    if comm.rank == comm.size - 1:
        columns[0] = rows[1]
    assert Pattern.from_coo(rows, columns, 2, comm).row_without_diagonal == 2 * comm.size - 2


def test_more_ranks_than_rows(comm):
    own = [0] if comm.rank == comm.size - 1 else []
    pattern = Pattern.from_coo(own, own, len(own), comm)
    assert (pattern.n_rows, pattern.n_local, pattern.nnz) == (1, len(own), len(own))


@pytest.mark.parametrize(
    ("rows", "columns", "n_local", "error", "message"),
    [
        ([1000], [0], 2, ValueError, "row 1... is outside the matrix"),
        ([-9], [0], 2, ValueError, "row -. is outside the matrix"),
        ([0], [1000], 2, ValueError, "column 1000 is outside the matrix"),
        ([0], [-1], 2, ValueError, "column -1 is outside the matrix"),
        ([0, 1], [0], 2, ValueError, "same length, got 2 and 1"),
        ([0.0], [0], 2, TypeError, "rows must be a one-dimensional array of integers"),
        ([0], [0], "2", TypeError, "n_local must be a Python integer"),
        ([0], [0], -2, ValueError, "must not be negative, got n_local=-2"),
    ],
)
def test_a_fault_of_one_rank_is_an_error_on_all(comm, rows, columns, n_local, error, message):
    at_fault = comm.size - 1
    offset = 2 * comm.rank
    if comm.rank != at_fault:
        rows, columns, n_local = [0, 1], [0, 0], 2
    rows = np.asarray(rows) + offset if np.asarray(rows).dtype.kind == "i" else rows
    with pytest.raises(error, match=found_on(comm, at_fault, message)):
        Pattern.from_coo(rows, columns, n_local, comm)


def test_no_rows_at_all(comm):
    with pytest.raises(ValueError, match="no rank has any row"):
        Pattern.from_coo([], [], 0, comm)


def test_columns_are_given_by_all_ranks_or_none(comm):
    own = [2 * comm.rank]
    if comm.size > 1:
        columns = 2 if comm.rank == comm.size - 1 else None
        with pytest.raises(ValueError, match=f"rank {comm.size - 1} gives n_local_columns and oth"):
            Pattern.from_coo(own, own, 2, comm, n_local_columns=columns)


def test_even_stripe(comm):
    for n in (0, 3, 17):
        stripes_of_all = comm.mpi.allgather(local_range(n, comm))
        assert [row for part in stripes_of_all for row in part] == list(range(n))
        assert max(map(len, stripes_of_all)) - min(map(len, stripes_of_all)) <= 1


def test_stripes_cover_everything(comm):
    sizes = stripes(23, comm.size)
    assert sum(sizes) == 23
    assert min(sizes) > 0
