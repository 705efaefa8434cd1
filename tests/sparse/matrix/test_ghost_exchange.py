import jax
import jax.numpy as jnp
import numpy as np
import pytest
from systems import stripes

import mpigrad as mg
from helpers import found_on
from mpigrad.sparse import GhostExchange


def _exchange(comm, n=23, empty=None, wanted=17):
    sizes = stripes(n, comm.size, empty)
    needed = np.random.default_rng(comm.rank).integers(0, n, wanted)
    exchange = GhostExchange(sizes[comm.rank], needed, comm)
    return exchange, needed, slice(exchange.offset, exchange.offset + exchange.n_local)


@pytest.mark.cases("rest0-1", "rest2-None", reason="a vector and several axes, with an empty rank")
@pytest.mark.parametrize("empty", [None, 1])
@pytest.mark.parametrize("rest", [(), (2,), (2, 3)])
def test_reads_any_entry_of_any_rank(comm, rest, empty):
    exchange, needed, mine = _exchange(comm, empty=empty if comm.size > 1 else None)
    everything = np.random.default_rng(9).standard_normal((23, *rest))
    got = mg.jit(exchange.exchange)(jnp.asarray(everything[mine]))
    np.testing.assert_array_equal(got, everything[needed])


def test_integers_travel_too(comm):
    exchange, needed, mine = _exchange(comm)
    np.testing.assert_array_equal(exchange.exchange(np.arange(23)[mine]), needed)


def test_adjoint_accumulates(comm):
    exchange, needed, mine = _exchange(comm)
    _, back = mg.vjp(exchange.exchange, jnp.zeros(exchange.n_local))
    (got,) = back(jnp.ones(len(needed)))
    readers = sum(np.bincount(part, minlength=23) for part in comm.mpi.allgather(needed))
    np.testing.assert_array_equal(got, readers[mine])


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.cases("rest1", reason="the adjoint of vectors is tested above")
@pytest.mark.parametrize("rest", [(), (3,)])
def test_dot(comm, rest):
    exchange, _, _ = _exchange(comm, empty=0 if comm.size > 1 else None)
    x = jnp.asarray(np.random.default_rng(comm.rank).standard_normal((exchange.n_local, *rest)))
    assert mg.dot_test(exchange.exchange, x).error < 1e-13


def test_batches(comm):
    exchange, needed, mine = _exchange(comm)
    everything = np.random.default_rng(9).standard_normal((4, 23))
    got = mg.vmap(exchange.exchange)(jnp.asarray(everything[:, mine]))
    np.testing.assert_array_equal(got, everything[:, needed])


@pytest.mark.thin(3)
def test_only_neighbours_meet(comm):
    """On a line each rank reads the entries next to its own."""
    n = 4
    edge = np.array([comm.rank * n - 1, (comm.rank + 1) * n])
    needed = edge[(edge >= 0) & (edge < n * comm.size)]
    exchange = GhostExchange(n, needed, comm)
    expected = [r for r in (comm.rank - 1, comm.rank + 1) if 0 <= r < comm.size]
    assert exchange.neighbors == tuple(expected)
    assert exchange.sendcounts == exchange.recvcounts == (1,) * len(expected)
    np.testing.assert_array_equal(exchange.ghosts, needed)


@pytest.mark.parametrize(
    ("n_local", "needed", "error", "message"),
    [
        (3, [0, 99], ValueError, "needed holds index 99, but"),
        (3, [-1], ValueError, "needed holds index -1, but"),
        (3, [0.5], TypeError, "needed must be a one-dimensional array of integers"),
        (3, [[0]], TypeError, "needed must be a one-dimensional array of integers"),
        (-1, [0], ValueError, "must not be negative, got n_local=-1"),
        (1.5, [0], TypeError, "n_local must be a Python integer"),
    ],
)
def test_a_fault_of_one_rank_is_an_error_on_all(comm, n_local, needed, error, message):
    at_fault = comm.size - 1
    bad = comm.rank == at_fault
    with pytest.raises(error, match=found_on(comm, at_fault, message)):
        GhostExchange(n_local if bad else 3, needed if bad else [0], comm)


def test_wrong_length_of_vector(comm):
    exchange, _, _ = _exchange(comm)
    with pytest.raises(ValueError, match=rf"rank {comm.rank} owns {exchange.n_local} entries"):
        exchange.exchange(jnp.zeros(exchange.n_local + 1))


@pytest.mark.ranks(2, 3)
def test_who_only_receives_is_batched_and_differentiated(comm):
    """Each rank reads the first entry of the next one, by JAX's own transformations."""
    after = comm.rank + 1 < comm.size
    exchange = GhostExchange(2, [2 * comm.rank + 2] if after else [], comm)
    whole = np.arange(2.0 * comm.size) ** 2
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)
    next_one = whole[mine.stop : mine.stop + 1]
    x = jnp.asarray(whole[mine])

    batch = jax.vmap(exchange.exchange)(jnp.stack([x, 2 * x]))
    np.testing.assert_array_equal(batch, np.stack([next_one, 2 * next_one]))
    value, tangent = jax.jvp(exchange.exchange, (x,), (3 * x,))
    np.testing.assert_array_equal(value, next_one)
    np.testing.assert_array_equal(tangent, 3 * next_one)
    gradient = jax.grad(lambda x: jnp.sum(exchange.exchange(x) ** 2))(x)
    np.testing.assert_array_equal(gradient, [2 * whole[mine.start] if comm.rank else 0, 0])
