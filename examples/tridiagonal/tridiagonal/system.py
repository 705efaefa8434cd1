"""A tridiagonal matrix by rows over ranks: its product with a vector, and its solve."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

import mpigrad as mg
from mpigrad.extend import call_site, describe, implicit_solve, raise_on_all_ranks

__all__ = ["Tridiagonal", "product", "solve"]


class Tridiagonal(NamedTuple):
    """This rank's rows, at least two: `lower[i] x[i-1] + diagonal[i] x[i] + upper[i] x[i+1]`.

    The rows of the ranks follow each other. The first entry of `lower` on the first rank and the
    last entry of `upper` on the last rank multiply nothing.
    """

    lower: jax.Array
    diagonal: jax.Array
    upper: jax.Array


def _ends_of_neighbors(x: jax.Array, comm: mg.Communicator) -> tuple[jax.Array, jax.Array]:
    """Return the last entry of the rank before and the first entry of the rank behind, or zeros."""
    ends = mg.allgather(jnp.stack([x[0], x[-1]]), comm=comm)
    before = ends[comm.rank - 1, 1] if comm.rank > 0 else 0 * ends[0, 1]
    behind = ends[comm.rank + 1, 0] if comm.rank < comm.size - 1 else 0 * ends[0, 0]
    return before, behind


def product(A: Tridiagonal, x: jax.Array, comm: mg.Communicator | None = None) -> jax.Array:
    """Return A x (collective)."""
    comm = mg.default_communicator() if comm is None else comm
    before, behind = _ends_of_neighbors(x, comm)
    left = jnp.concatenate([before[None], x[:-1]])
    right = jnp.concatenate([x[1:], behind[None]])
    return A.lower * left + A.diagonal * x + A.upper * right


def _transposed(A: Tridiagonal, comm: mg.Communicator) -> Tridiagonal:
    before, _ = _ends_of_neighbors(A.upper, comm)
    _, behind = _ends_of_neighbors(A.lower, comm)
    return Tridiagonal(
        lower=jnp.concatenate([before[None], A.upper[:-1]]),
        diagonal=A.diagonal,
        upper=jnp.concatenate([A.lower[1:], behind[None]]),
    )


def _solve(A: Tridiagonal, b: jax.Array, comm: mg.Communicator) -> jax.Array:
    """Eliminate the rows of each rank, then solve for the ends of all ranks (SPIKE).

    On each rank x = y - v x_before - w x_behind, where y, v and w are solutions with the rank's own
    rows. The ends of the ranks are then unknowns of a small dense system, which all ranks solve
    (Polizzi & Sameh, "A parallel hybrid banded system solver: the SPIKE algorithm", 2006).
    """
    sides = jnp.zeros((len(b), 3), b.dtype).at[:, 0].set(b)
    sides = sides.at[0, 1].set(A.lower[0] if comm.rank > 0 else 0.0)
    sides = sides.at[-1, 2].set(A.upper[-1] if comm.rank < comm.size - 1 else 0.0)
    lower, upper = A.lower.at[0].set(0.0), A.upper.at[-1].set(0.0)
    y, v, w = jax.lax.linalg.tridiagonal_solve(lower, A.diagonal, upper, sides).T
    if comm.size == 1:
        return y
    ends = jnp.stack([y, v, w])[:, jnp.array([0, -1])]
    ends = mg.allgather(ends, comm=comm)  # (rank, y or v or w, first or last)
    n = 2 * comm.size
    matrix, known = jnp.eye(n, dtype=b.dtype), ends[:, 0].reshape(n)
    for rank in range(comm.size):
        rows = jnp.array([2 * rank, 2 * rank + 1])
        if rank > 0:
            matrix = matrix.at[rows, 2 * rank - 1].set(ends[rank, 1])
        if rank < comm.size - 1:
            matrix = matrix.at[rows, 2 * rank + 2].set(ends[rank, 2])
    x = jnp.linalg.solve(matrix, known)
    before = x[2 * comm.rank - 1] if comm.rank > 0 else 0.0
    behind = x[2 * comm.rank + 2] if comm.rank < comm.size - 1 else 0.0
    return y - v * before - w * behind


def solve(A: Tridiagonal, b: jax.Array, comm: mg.Communicator | None = None) -> jax.Array:
    """Return x with A x = b (collective). It has exact derivatives of any order in A and b.

    Raises
    ------
    ValueError
        On all ranks: if a rank has fewer than two rows, or arrays of other dtypes or shapes.
    """
    comm = mg.default_communicator() if comm is None else comm
    with raise_on_all_ranks(comm):
        shapes = [f"{x.dtype}{list(x.shape)}" for x in (*A, b)]
        if len(set(shapes)) > 1 or b.ndim != 1 or len(b) < 2 or b.dtype.kind != "f":
            raise ValueError(
                f"tridiagonal.solve at {describe(call_site())}: expected the diagonals and b as "
                f"arrays of one dtype, float32 or float64, and one shape (n,) with n >= 2, got "
                f"{', '.join(shapes)} on rank {comm.rank}. Use fewer ranks or more rows."
            )
    return implicit_solve(
        lambda A, b: _solve(A, b, comm),
        lambda A, x: product(A, x, comm),
        A,
        b,
        transposed=lambda A: _transposed(A, comm),
    )
