"""Sums that go through the memory of a host, and are the same bits on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad as mg
from mpigrad.communicator import Communicator
from mpigrad.guard.board import _is_crowded
from mpigrad.runtime.native import library

PIECE = 1 << 16  # bytes
CERTAIN = 1 << 17  # bytes, times the other ranks: up to here all sums go through shared memory
LENGTHS = (1, 7, PIECE // 8 - 1, PIECE // 8, PIECE // 8 + 1, CERTAIN // 8, CERTAIN // 8 + 1)
MPI_, SHARED, TRIAL = range(3)  # results of mpigrad_way_of_sum
TRIALS = 20


def in_order(X: np.ndarray) -> np.ndarray:
    """Rank after rank."""
    total = X[0]
    for row in X[1:]:
        total = total + row
    return total


@pytest.mark.thin(2, 3, reason="three ranks take turns, and go on to MPI for long arrays")
@pytest.mark.cases("float32", "complex128", reason="complex numbers are pairs of these")
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_every_length(dtype: str, comm: Communicator) -> None:
    """At the ends of pieces, and of what always goes through shared memory; in place, too."""
    rng = np.random.default_rng(1)
    in_place = mg.jit(lambda x: mg.allreduce(x * 1), donate_argnums=0)
    for n in LENGTHS:
        X = rng.standard_normal((comm.size, n)) + 1j * rng.standard_normal((comm.size, n))
        X = (X if dtype.startswith("complex") else X.real).astype(dtype)
        x, total = jnp.asarray(X[comm.rank]), in_order(X)
        exact = comm.size == 2 or n * X.itemsize * (comm.size - 1) <= CERTAIN
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


@pytest.fixture
def enough_processors() -> Iterator[None]:
    """As if each rank had a processor, so that ranks try both ways."""
    crowded = _is_crowded(MPI.COMM_WORLD)
    library().mpigrad_set_crowded(False)
    yield
    library().mpigrad_set_crowded(crowded)


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("enough_processors")
@pytest.mark.parametrize("size", [CERTAIN + 8, 1 << 18, (1 << 22) - 8])
def test_two_ranks_try_both_ways(size: int, comm: Communicator) -> None:
    """All trials have the same bits, and afterwards all ranks use the same way."""
    fresh, way = comm.dup(), library().mpigrad_way_of_sum
    X = np.random.default_rng(1).standard_normal((comm.size, size // 8))
    x, total = jnp.asarray(X[comm.rank]), in_order(X)
    add = mg.jit(lambda x: mg.allreduce(x, comm=fresh))
    for _ in range(TRIALS + 1):
        assert way(fresh.slot, size) == (TRIAL if comm.size == 2 else MPI_)
        if comm.size > 2:  # MPI has an order of its own, so that a choice would change the bits
            return
        np.testing.assert_array_equal(add(x), total)
    assert way(fresh.slot, size) in (MPI_, SHARED)
    assert len(set(comm.mpi.allgather(way(fresh.slot, size)))) == 1
    assert way(fresh.slot, size * 2) == (TRIAL if size < 1 << 21 else MPI_)
    np.testing.assert_array_equal(add(x), total)


@pytest.mark.usefixtures("enough_processors")
def test_mismatch_in_a_trial(comm: Communicator) -> None:
    """It is an error on both ranks, and they stay in step."""
    fresh = comm.dup()
    for n in (1 << 15, (1 << 16) + comm.rank, 1 << 15):
        x = jnp.ones(n + 1)
        if n == 1 << 15:
            np.testing.assert_array_equal(mg.allreduce(x, comm=fresh), comm.size * x)
        elif comm.size == 2:
            with pytest.raises(Exception, match="allreduce"):
                mg.allreduce(x, comm=fresh)
    for size in (1 << 18, 1 << 19):
        x = jnp.ones(size // 8)
        for _ in range(TRIALS + 1):
            mg.allreduce(x, comm=fresh)
        ways = comm.mpi.allgather(library().mpigrad_way_of_sum(fresh.slot, size))
        assert len(set(ways)) == 1


def test_ranks_that_share_a_processor_try_nothing(comm: Communicator) -> None:
    crowded = _is_crowded(MPI.COMM_WORLD)
    library().mpigrad_set_crowded(True)
    assert library().mpigrad_way_of_sum(comm.slot, 2 * CERTAIN) == MPI_
    library().mpigrad_set_crowded(crowded)


@pytest.mark.thin(3)
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
