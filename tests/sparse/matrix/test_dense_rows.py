"""Solves with one dense row and one dense column, and ranks with one row or none."""

import jax.numpy as jnp
import numpy as np
import pytest
from whole import Entries, Striped, prove, rows_of

from mpigrad.sparse import GMRES, BiCGStab, Jacobi, Matrix, Pattern, hypre_available, solve

SOLVERS = {"own": BiCGStab(rtol=1e-13, preconditioner=Jacobi())} | (
    {"hypre": GMRES(rtol=1e-13)} if hypre_available() else {}
)
# Rows of each rank, by its number.
ROWS = {
    "some": lambda rank: 4 + rank,
    "one each": lambda rank: 1,
    "none on one": lambda rank: 5 * (rank != 1),
    "all on the first": lambda rank: 7 * (rank == 0),
}


def arrow(comm, n_local):
    """The diagonal, its neighbours, and the row and the column in the middle."""
    counts = comm.mpi.allgather(n_local)
    first, n = sum(counts[: comm.rank]), sum(counts)
    middle, entries = n // 2, []
    for row in range(first, first + n_local):
        columns = range(n) if row == middle else {row - 1, row, row + 1, middle} & {*range(n)}
        entries += [(row, column) for column in sorted(columns)]
    rows, columns = np.array(entries, np.int64).reshape(-1, 2).T
    return Pattern.from_coo(rows, columns, n_local, comm)


@pytest.mark.cases(
    "own-some",
    f"{list(SOLVERS)[-1]}-none on one",
    reason="both kinds of solvers, and a rank without rows",
)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_values_and_derivatives(comm, rows, solver):
    """Forward, reverse and second order, in the entries and in the right-hand side."""
    pattern = arrow(comm, ROWS[rows](comm.rank))
    entries = Entries.of(pattern)
    n = pattern.n_rows
    # Not symmetric, and the diagonal outweighs its row.
    values = entries.values(1).whole + 3 * n * (entries.rows == entries.columns)
    b = rows_of(pattern)
    prove(
        lambda a, b: n * solve(Matrix(pattern, a), b, SOLVERS[solver]).value,
        lambda a, b: n * jnp.linalg.solve(entries.dense(a), b),
        (Striped(values, entries.mine), b),
        b.mine,
        rtol=1e-10,
    )
