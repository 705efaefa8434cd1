"""Particles that move between ranks, with their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpigrad as mg
from mpigrad.grid import Grid, exchange_particles, rank_at_position

COMM = mg.default_communicator()
PLACES, MOST = 7, 3


def draw(seed=0):
    """This rank's (number of each particle, its rank, and which places are taken)."""
    generator = np.random.default_rng([seed, COMM.rank])
    taken = np.zeros(PLACES, bool)
    taken[generator.permutation(PLACES)[:3]] = True
    return np.arange(PLACES) + PLACES * COMM.rank, generator.integers(0, COMM.size, PLACES), taken


@pytest.mark.thin(1, 3, reason="one rank sends nothing; three have two partners, in other orders")
def test_particles_arrive_at_their_owners_with_all_their_arrays():
    number, owner, taken = draw()
    arrays = {"number": jnp.asarray(number), "x": jnp.asarray(np.stack([number, -number], 1) * 0.5)}
    moved, alive = mg.jit(lambda a: exchange_particles(a, owner, taken, MOST))(arrays)
    # Every rank draws what the others drew.
    expected = sorted(
        int(n)
        for numbers, owners, places in COMM.mpi.allgather((number, owner, taken))
        for n in numbers[places & (owners == COMM.rank)]
    )
    assert sorted(np.asarray(moved["number"])[alive].tolist()) == expected
    stays = taken & (owner == COMM.rank)
    np.testing.assert_array_equal(np.asarray(moved["number"])[stays], number[stays])
    np.testing.assert_array_equal(moved["x"][:, 0], moved["number"] * 0.5)
    np.testing.assert_array_equal(moved["x"][:, 1], moved["number"] * -0.5)
    assert not np.any(np.asarray(moved["number"])[~np.asarray(alive)])


@pytest.mark.thin(3)
def test_cotangents_go_back():
    _, owner, taken = draw()
    x = jnp.asarray(np.random.default_rng(COMM.rank).normal(size=(PLACES, 2)))
    move = mg.jit(lambda x: exchange_particles(x, owner, taken, MOST)[0])
    mg.dot_test(move, x)
    mg.taylor_test(mg.jit(lambda x: jnp.sum(move(jnp.sin(x)) ** 3)), x)


@pytest.mark.ranks(2)
def test_overflow_ends_all_ranks():
    everybody = jnp.ones(PLACES, bool)
    run = mg.jit(lambda x, owner, alive: exchange_particles(x, owner, alive, MOST)[0])
    away = jnp.full(PLACES, 1)  # those of rank 1 stay
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"at most 3 particles .* got 7\. Raise most"
    ):
        run(jnp.ones(PLACES), away, everybody)
    few = jnp.arange(PLACES) < MOST if COMM.rank == 0 else everybody
    with pytest.raises(jax.errors.JaxRuntimeError, match="has room for 7 particles, got 3 more"):
        run(jnp.ones(PLACES), away, few)
    with pytest.raises(jax.errors.JaxRuntimeError, match="must stay or go to a partner, got 7"):
        run(jnp.ones(PLACES), jnp.full(PLACES, 5), everybody)


@pytest.mark.ranks(1)
def test_wrong_arguments():
    x, owner, alive = jnp.ones(4), jnp.zeros(4, int), jnp.ones(4, bool)
    with pytest.raises(TypeError, match="most must be a positive Python integer, got 0"):
        exchange_particles(x, owner, alive, 0)
    with pytest.raises(TypeError, match="owner must be integers"):
        exchange_particles(x, x, alive, 1)
    with pytest.raises(TypeError, match=r"alive must be booleans of shape \(4,\)"):
        exchange_particles(x, owner, owner, 1)
    with pytest.raises(ValueError, match=r"particles must have the shape \(4, ...\)"):
        exchange_particles(jnp.ones(3), owner, alive, 1)
    with pytest.raises(ValueError, match=r"the grid's axes last, got \(4,\)"):
        rank_at_position(x, Grid((4, 4), (1.0, 1.0)))


@pytest.mark.thin(4)
def test_positions_belong_to_the_tile_around_them():
    grid = Grid((6, 5), (0.5, 2.0), periodic=(True, False))
    x = jnp.stack(grid.centers(), axis=-1)
    np.testing.assert_array_equal(rank_at_position(x, grid), COMM.rank)
    np.testing.assert_array_equal(rank_at_position(x + np.array([3.0, 0.0]), grid), COMM.rank)
    outside = rank_at_position(jnp.array([[0.1, -7.0], [0.1, 99.0]]), grid)
    inside = rank_at_position(jnp.array([[0.1, 0.1], [0.1, 9.9]]), grid)
    np.testing.assert_array_equal(outside, inside)


@pytest.mark.ranks(2)
def test_a_particle_at_nan_belongs_to_nobody() -> None:
    grid = Grid((8, 8), (1.0, 1.0), COMM, periodic=(True, False))
    x = jnp.array([[1.0, 2.0], [np.nan, 2.0], [1.0, -np.inf]])
    owner = rank_at_position(x, grid)
    np.testing.assert_array_equal(owner[1:], -1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank -1 because a position is NaN"):
        exchange_particles(x, owner, jnp.ones(3, bool), most=3, comm=COMM)
