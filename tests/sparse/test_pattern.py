import numpy as np
import pytest
from systems import grid_system, stripes

from mpigrad.sparse import Pattern


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


def test_rows_in_order_are_left_alone(comm):
    n = 3
    rows = np.repeat(np.arange(n), 2) + n * comm.rank
    columns = np.tile([0, n * comm.size - 1], n)
    if n * comm.size > 1:
        pattern = Pattern.from_coo(rows, columns, n, comm)
        assert pattern.is_ordered
        np.testing.assert_array_equal(pattern.order, np.arange(2 * n))


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
        ([0, 2], [0, 0], 2, ValueError, "row .* does not belong to this rank"),
        ([-1], [0], 2, ValueError, "row .* does not belong to this rank"),
        ([0], [1000], 2, ValueError, "column 1000 is outside the matrix"),
        ([0], [-1], 2, ValueError, "column -1 is outside the matrix"),
        ([0, 1, 0], [0, 0, 0], 2, ValueError, "is given more than once"),
        ([0, 1], [0], 2, ValueError, "2 rows but 1 columns"),
        ([0.0], [0], 2, TypeError, "rows must be a one-dimensional array of integers"),
        ([0], [0], "2", TypeError, "n_local must be a Python integer"),
        ([0], [0], -2, ValueError, "n_local=-2 is negative"),
    ],
)
def test_a_fault_of_one_rank_is_an_error_on_all(comm, rows, columns, n_local, error, message):
    at_fault = comm.size - 1
    offset = 2 * comm.rank
    if comm.rank != at_fault:
        rows, columns, n_local = [0, 1], [0, 0], 2
    rows = np.asarray(rows) + offset if np.asarray(rows).dtype.kind == "i" else rows
    with pytest.raises(error, match=rf"{message}.*\(found on rank {at_fault}\)"):
        Pattern.from_coo(rows, columns, n_local, comm)


def test_no_rows_at_all(comm):
    with pytest.raises(ValueError, match="no rank has any row"):
        Pattern.from_coo([], [], 0, comm)


def test_stripes_cover_everything(comm):
    sizes = stripes(23, comm.size)
    assert sum(sizes) == 23
    assert min(sizes) > 0
