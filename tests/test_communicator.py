"""Communicators: parts, grids of ranks, several at once, and the default inside `with`."""

from __future__ import annotations

import copy
import pickle
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad as mg
from helpers import close
from mpigrad.communicator import (
    BlockingCall,
    Cartesian,
    Communicator,
    default_communicator,
    resolve,
    world,
)
from mpigrad.guard import board as b
from mpigrad.guard.failure import current_board


@pytest.mark.thin(3)
def test_ranks_left_out_of_a_split(comm: Communicator) -> None:
    part = comm.split(None if comm.rank == 0 else 0, key=-comm.rank)
    assert bool(part) == (comm.rank > 0)
    assert part.size == (comm.size - 1 if part else 0)
    if part:
        assert part.rank == comm.size - 1 - comm.rank
        close(mg.allreduce(jnp.ones(2), comm=part), jnp.full(2, comm.size - 1.0))
        assert default_communicator() is not part
    else:
        for use in (
            lambda: mg.allreduce(jnp.ones(2), comm=part),
            lambda: part.split(0),
            lambda: part.rank,
            part.__enter__,
        ):
            with pytest.raises(ValueError, match=r"rank 0 of .* was left out.*Write `if comm"):
                use()
        assert not hasattr(part, "something else")
    none = comm.split(MPI.UNDEFINED)
    assert not none and none.size == 0


def test_several_communicators_at_once(comm: Communicator) -> None:
    """Rows and columns of the ranks, in one differentiated program."""
    rows, columns = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    world = comm.dup()
    x = jnp.float64(comm.rank + 1)

    def f(x):
        return (
            mg.allreduce(x, comm=rows) * mg.allreduce(x, comm=columns) * mg.allreduce(x, comm=world)
        )

    def joint(X):
        r = np.arange(comm.size)
        of = lambda color: jnp.asarray(color[:, None] == color[None, :], X.dtype) @ X
        return jnp.sum(of(r // 2) * of(r % 2) * jnp.sum(X))

    want = jax.grad(joint)(jnp.arange(1.0, comm.size + 1))[comm.rank]
    close(mg.grad(f)(x), want)
    close(mg.jit(mg.grad(f))(x), want)


def test_default_inside_with(comm: Communicator) -> None:
    pair = comm.split(comm.rank // 2)
    f = lambda x: mg.allreduce(x)
    fast, plain = mg.jit(f), jax.jit(f)
    gradient = mg.jit(mg.grad(lambda x: jnp.sum(fast(x))))
    x = jnp.ones(3)
    for _ in range(2):  # the second time from the caches
        for g in (f, fast, plain, gradient):
            close(g(x), jnp.full(3, comm.size))
            with pair as inside:
                assert inside is pair and default_communicator() is pair and resolve(None) is pair
                close(g(x), jnp.full(3, pair.size))
                with comm:
                    close(g(x), jnp.full(3, comm.size))
                close(g(x), jnp.full(3, pair.size))
    with pytest.raises(RuntimeError, match="in the middle"), pair, comm:
        raise RuntimeError("in the middle")
    assert default_communicator().size == comm.size and default_communicator() is not pair
    with pair:
        _, back = mg.vjp(f, x)
    close(back(x)[0], jnp.full(3, pair.size))  # an adjoint goes the way of its message


@pytest.mark.thin(4)
@pytest.mark.cases("periods2", reason="it has an open and a periodic axis")
@pytest.mark.parametrize("periods", [False, True, (False, True)])
def test_grids_of_ranks(periods, comm: Communicator) -> None:
    """As MPI's own: places, shifts, and a message along each axis with its derivative."""
    grid = comm.cartesian((2, 0) if comm.size % 2 == 0 else (1, 0), periods)
    assert isinstance(grid, Cartesian)
    rings = list(periods) if isinstance(periods, tuple) else [periods, periods]
    mpi = comm.mpi.Create_cart(grid.dims, rings)
    assert grid.coords == tuple(mpi.Get_coords(mpi.rank)) and grid.periods == tuple(rings)
    near = set()
    for axis in (0, 1):
        for displacement in (1, -1, 2):
            assert grid.shift(axis, displacement) == mpi.Shift(axis, displacement)
        source, dest = grid.shift(axis)
        near |= {source, dest}
        x = jnp.full(2, grid.rank + 1.0)
        value, back = mg.vjp(lambda x, d=dest, s=source: mg.sendrecv(x, d, s, comm=grid), x)
        close(value, jnp.full(2, 0.0 if source == MPI.PROC_NULL else source + 1.0))
        close(back(x)[0], jnp.full(2, 0.0 if dest == MPI.PROC_NULL else dest + 1.0))
    assert sorted(grid.neighbors) == sorted(near - {MPI.PROC_NULL, grid.rank})
    assert grid.rank_at(grid.coords) == grid.rank
    mpi.Free()


def test_wrong_grids_of_ranks(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=f"need {comm.size + 1} ranks, got {comm.size}"):
        comm.cartesian([comm.size + 1])
    with pytest.raises(ValueError, match="divisible by 7"):
        comm.cartesian([7, 0])
    with pytest.raises(ValueError, match="2 periods for 1 axes"):
        comm.cartesian([0], periods=[True, False])
    with pytest.raises(ValueError, match="must be positive"):
        comm.cartesian([-1, 1])
    line = comm.cartesian([max(1, comm.size - 1)])
    assert bool(line) == (comm.rank < max(1, comm.size - 1))
    if isinstance(line, Cartesian):
        with pytest.raises(ValueError, match="one of the 1 axes of the grid, got 1"):
            line.shift(1)


def test_wrong_communicators() -> None:
    with pytest.raises(TypeError, match="Wrap it once"):
        mg.allreduce(1.0, comm=MPI.COMM_WORLD)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got str"):
        mg.allreduce(1.0, comm="world")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a member of"):
        Communicator(MPI.COMM_NULL)


def test_copies_and_pickles(comm: Communicator) -> None:
    """What a program copies may hold one; what it writes may not."""
    assert copy.deepcopy({"comm": comm})["comm"] is comm
    assert copy.copy(comm) is comm
    with pytest.raises(TypeError, match="only on the ranks of this run"):
        pickle.dumps([comm])


def test_compiled_programs_keep_their_communicator(comm: Communicator) -> None:
    given = MPI.COMM_WORLD.Dup()
    own = Communicator(given)
    given.Free()
    with pytest.raises(RuntimeError, match=rf"comm\.mpi\.Free: .* on rank {comm.rank}"):
        own.mpi.Free()
    assert float(mg.allreduce(jnp.ones(()), comm=own)) == comm.size


@pytest.mark.ranks(2)
def test_ctrl_c_while_a_blocking_call_begins(comm: Communicator) -> None:
    """It waits for the other rank, and is over when the interrupt is noticed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    call = BlockingCall("meet", comm.slot)
    if comm.rank == 0:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt), call:
            pass
        signal.signal(signal.SIGALRM, before)
    else:
        time.sleep(1.0)
        with call:
            pass
    board = current_board()
    assert int(board.slots[board.own_index]["state"]) == b.IN_PYTHON
    assert float(mg.allreduce(1.0)) == comm.size


def test_freed_communicators(comm: Communicator) -> None:
    """More splits than the table has places: sums are right, also in programs of their own."""
    for k in range(540):
        part = comm.split(comm.rank % 2, key=-comm.rank)
        if k % 180 == 0:
            total = mg.jit(lambda x, part=part: mg.allreduce(x, comm=part))(jnp.ones(3))
            close(total, jnp.full(3, float(part.size)))
        part.free()

    ring = comm.cartesian((0,), periods=True)
    assert isinstance(ring, Cartesian)
    source, dest = ring.shift(0)
    program = mg.jit(
        mg.grad(lambda x: jnp.sum(mg.sendrecv(x, dest, source, comm=ring) ** 2), comm=ring)
    )
    close(program(jnp.ones(2)), jnp.full(2, 2.0))
    mpi = ring.mpi
    ring.free()
    follower = comm.dup()  # has the place of the freed one
    freed = r"was freed at .*test_communicator\.py:\d+"
    for use in (
        lambda: mg.allreduce(jnp.ones(2), comm=ring),
        lambda: ring.rank,
        lambda: ring.dims,
        ring.free,
        ring.__enter__,
        mpi.Barrier,
        lambda: jax.block_until_ready(program(jnp.ones(2))),
    ):
        with pytest.raises((RuntimeError, jax.errors.JaxRuntimeError), match=freed):
            use()
    close(mg.allreduce(jnp.ones(2), comm=follower), jnp.full(2, float(comm.size)))
    assert repr(ring).startswith("Communicator(freed at")
    with follower, pytest.raises(RuntimeError, match="the default of an enclosing"):
        follower.free()
    follower.free()
    comm.split(None).free()  # left out: nothing happens
    with pytest.raises(RuntimeError, match="that of all ranks"):
        world().free()
