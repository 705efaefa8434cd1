"""With the guard too, an operation with several messages hands over each of them by itself."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

import mpigrad as mg
from mpigrad.communicator import Communicator
from mpigrad.guard.failure import current_board

LONG, SHORT = 100_000, 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("n", [SHORT, LONG])
@pytest.mark.parametrize("tag", [0, None])
def test_sendrecv_with_a_partner_that_receives_first(comm: Communicator, n: int, tag) -> None:
    x = jnp.ones(n) * (comm.rank + 1)
    if comm.rank == 0:
        y = mg.recv(x, 1, comm=comm) if tag is None else mg.recv(x, 1, tag=tag, comm=comm)
        mg.send(x, 1, comm=comm)
    else:
        y = mg.sendrecv(x, 0, 0, comm=comm)
    assert float(y[-1]) == 2 - comm.rank


@pytest.mark.ranks(2)
def test_sendrecv_with_a_partner_that_sends_first(comm: Communicator) -> None:
    x = jnp.ones(LONG) * (comm.rank + 1)
    if comm.rank == 0:
        mg.send(x, 1, comm=comm)
        y = mg.recv(x, 1, comm=comm)
    else:
        y = mg.sendrecv(x, 0, 0, comm=comm)
    assert float(y[-1]) == 2 - comm.rank


@pytest.mark.ranks(3)
def test_two_operations_help_a_third(comm: Communicator) -> None:
    """Rank 0 needs both neighbours, and neither can end its own operation before."""
    rows = jnp.ones((2, 4)) * (comm.rank + 1)
    if comm.rank == 0:
        got = mg.neighbor_alltoallv(rows[:0], [1, 2], [0, 0], [1, 1], comm=comm)
        mg.neighbor_alltoallv(rows, [1, 2], [1, 1], [0, 0], comm=comm)
    else:
        got = mg.neighbor_alltoallv(rows[:1], [0], [1], [1], comm=comm)
    assert float(got.sum()) == (20.0 if comm.rank == 0 else 4.0)


@pytest.mark.ranks(2)
def test_two_operations_help_each_other(comm: Communicator) -> None:
    x = jnp.ones(SHORT) * (comm.rank + 1)
    if comm.rank == 0:
        y = mg.sendrecv(x, 1, 1, comm=comm)
        mg.send(x, 1, comm=comm)
    else:
        mg.recv(x, 0, comm=comm)
        y = mg.sendrecv(x, 0, 0, comm=comm)
    assert float(y[0]) == 2 - comm.rank


@pytest.mark.ranks(3)
def test_a_third_rank_is_late(comm: Communicator) -> None:
    """Rank 2 needs both, and rank 0 needs a later message of rank 2."""
    x = jnp.ones((1, 4)) * (comm.rank + 1)
    if comm.rank == 0:
        y = mg.neighbor_alltoallv(x, [2], [1], [1], comm=comm)
        mg.neighbor_alltoallv(x, [2], [1], [0], comm=comm)
    elif comm.rank == 1:
        time.sleep(1.5)
        y = mg.neighbor_alltoallv(x, [2], [1], [0], comm=comm)
    else:
        mg.neighbor_alltoallv(x[:0], [0, 1], [0, 0], [1, 1], comm=comm)
        y = mg.neighbor_alltoallv(x, [0], [1], [1], comm=comm)
    assert float(y.sum()) == (12.0, 0.0, 4.0)[comm.rank]


@pytest.mark.ranks(3)
def test_messages_of_equal_tags_on_two_communicators(comm: Communicator) -> None:
    a, b = comm.dup(), comm.dup()
    x = jnp.ones(2) * (comm.rank + 1)
    if comm.rank == 0:
        y = mg.recv(x, 1, comm=a)
        mg.send(x, 2, comm=b)
    elif comm.rank == 1:
        request = mg.irecv(x, 2, tag=0, comm=b)
        y = mg.sendrecv(x, 0, 2, comm=a)
        mg.wait(request)
    else:
        y = mg.sendrecv(x, 1, 0, comm=b)
        mg.send(x, 1, comm=a)
    assert float(y[0]) == (2.0, 3.0, 1.0)[comm.rank]


@pytest.mark.ranks(2)
def test_a_partner_that_is_already_in_mpi(comm: Communicator) -> None:
    """The messages of rank 1 are not counted, so its partner does not wait on the board."""
    board = current_board()
    assert board is not None
    mine = board.slots[board.own_index]
    before, mine["counts_invalid"] = int(mine["counts_invalid"]), comm.rank == 1
    x = jnp.ones(2) * (comm.rank + 1)
    comm.mpi.barrier()
    if comm.rank == 0:
        y = mg.recv(x, 1, comm=comm)
        mg.send(x, 1, comm=comm)
    else:
        y = mg.sendrecv(x, 0, 0, comm=comm)
    assert float(y[0]) == 2 - comm.rank
    mine["counts_invalid"] = before


@pytest.mark.ranks(3)
def test_a_partner_that_waits_outside(comm: Communicator) -> None:
    """The guard does not see that rank 2 waits for rank 0."""
    x = jnp.ones(2) * (comm.rank + 1)
    if comm.rank == 0:
        mg.recv(x, 1, comm=comm)
        comm.mpi.send("go", 2)
    elif comm.rank == 1:
        assert float(mg.sendrecv(x, 0, 2, comm=comm)[0]) == 3.0
    else:
        comm.mpi.recv(source=0)
        mg.send(x, 1, comm=comm)


@pytest.mark.ranks(2)
def test_another_message_than_expected(comm: Communicator) -> None:
    """Rank 1 hands its message over, and is refused when it is sent another one than it expects."""
    comm = comm.dup()  # the message of rank 0 is never received
    x = jnp.ones(SHORT, "float32")
    with pytest.raises(jax.errors.JaxRuntimeError, match="a message does not match its receive"):
        if comm.rank == 0:
            mg.recv(x, 1, comm=comm)
            mg.send(x.astype("int32"), 1, comm=comm)
            mg.barrier(comm)
        else:
            mg.sendrecv(x, 0, 0, comm=comm)
