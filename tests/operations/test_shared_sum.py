"""Sums that go through the memory of a host, and are the same bits on every rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad.communicator import Communicator
from mpigrad.runtime.native import library

pytestmark = pytest.mark.thin(2, 4)

PIECE = 1 << 16  # bytes
LENGTHS = (1, 7, PIECE // 8 - 1, PIECE // 8, PIECE // 8 + 1, PIECE // 4 + 3, (1 << 20) // 8 + 1)


def in_order(X: np.ndarray) -> np.ndarray:
    """Rank after rank."""
    total = X[0]
    for row in X[1:]:
        total = total + row
    return total


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_every_length(dtype: str, comm: Communicator) -> None:
    """At the ends of pieces, and where MPI takes over; in the operand's place, too."""
    rng = np.random.default_rng(1)
    in_place = mg.jit(lambda x: mg.allreduce(x * 1), donate_argnums=0)
    for n in LENGTHS:
        X = rng.standard_normal((comm.size, n)) + 1j * rng.standard_normal((comm.size, n))
        X = (X if dtype.startswith("complex") else X.real).astype(dtype)
        x, total = jnp.asarray(X[comm.rank]), in_order(X)
        exact = n * X.itemsize * (comm.size - 1) <= 1 << 20
        close = np.testing.assert_array_equal if exact else np.testing.assert_allclose
        tolerance = {} if exact else {"rtol": 0, "atol": 1e-5}
        close(np.asarray(mg.allreduce(x)), total, **tolerance)
        np.testing.assert_array_equal(x, X[comm.rank])
        close(np.asarray(in_place(x)), total, **tolerance)


def test_without_shared_memory(comm: Communicator) -> None:
    """What is left to MPI gives the same, to rounding."""
    apart = comm.dup()
    library().mpigrad_share_sums(apart.slot, 0)
    x = jnp.asarray(np.random.default_rng(comm.rank).standard_normal(1000))
    np.testing.assert_allclose(mg.allreduce(x, comm=apart), mg.allreduce(x, comm=comm), rtol=1e-12)


@pytest.mark.thin(3, 4)
def test_communicators_in_turn(comm: Communicator) -> None:
    """A rank that goes on to another communicator leaves what others still read."""
    rank, size = comm.rank, comm.size
    world, pair = comm.dup(), comm.split(rank // 2)
    y0 = jnp.arange(3 * PIECE // 16, dtype=float)  # one and a half pieces of whole numbers

    def turn(_: jax.Array, y: jax.Array) -> jax.Array:
        a = mg.allreduce(y + rank, comm=pair)
        b = mg.allreduce(a[:5], comm=world)
        c = mg.allreduce(a + b[1], comm=comm)
        return jnp.mod(c, 1000) + rank

    Y, ranks = np.tile(np.asarray(y0), (size, 1)), np.arange(size)[:, None]
    together = (ranks // 2 == ranks.T // 2).astype(float)
    for _ in range(100):
        A = together @ (Y + ranks)
        Y = np.mod(np.sum(A + np.sum(A[:, 1]), axis=0), 1000) + ranks
    y = mg.jit(lambda y: jax.lax.fori_loop(0, 100, turn, y))(y0)
    np.testing.assert_array_equal(y, Y[rank])
