"""Correct programs that look like wrong ones, and must be accepted."""

import code
import sys
import time

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg

rank = MPI.COMM_WORLD.rank
x, y, big = jnp.ones(3), jnp.ones(2), jnp.ones(100_000)


def an_error_of_a_session_within_the_program_under_another_hook():
    sys.excepthook = lambda *error: None
    code.InteractiveInterpreter().runsource("1 / 0")
    assert isinstance(sys.last_value, ZeroDivisionError)


def a_sender_that_needs_the_progress_of_a_rank_in_a_barrier():
    if rank == 0:
        request = mg.irecv(big, 1)
        mg.barrier()
        mg.wait(request)
    else:
        mg.send(big, 0)
        mg.barrier()


def two_spellings_of_a_barrier():
    comm = mg.default_communicator()
    comm.mpi.barrier() if rank == 0 else comm.mpi.Barrier()
    mg.barrier() if rank == 0 else comm.mpi.Barrier()


def a_sender_that_needs_the_progress_of_a_rank_in_a_sum():
    if rank == 0:
        request = mg.irecv(big, 1)
        mg.allreduce(x)
        mg.wait(request)
    else:
        time.sleep(0.2)
        mg.send(big, 0)
        mg.allreduce(x)


def the_same_with_calls_of_mpi4py():
    if rank == 0:
        buffer = bytearray(1_000_000)
        request = MPI.COMM_WORLD.Irecv(buffer, 1)
        mg.barrier()
        request.Wait()
    else:
        MPI.COMM_WORLD.Send(bytearray(1_000_000), 0)
        mg.barrier()


def a_message_before_many_others():
    if rank == 0:
        time.sleep(2)
        mg.recv(x, 1)
    else:
        mg.send(x, 0)
        for _ in range(140):
            mg.send(x, 1)
            mg.recv(x, 1)
    mg.barrier()


def a_receive_of_any_tag_after_a_posted_one():
    if rank == 0:
        request = mg.irecv(x, 1)
        mg.recv(y, 1)
        mg.wait(request)
    else:
        mg.send(x, 0)
        mg.send(y, 0)


def receives_after_one_posted_for_anyone():
    if rank == 0:
        first = mg.irecv(x, MPI.ANY_SOURCE, MPI.ANY_TAG)
        mg.recv(y, 1)
        third, fourth = mg.irecv(big, 1), mg.irecv(y, MPI.ANY_SOURCE)
        assert mg.wait(first).shape == (3,)
        mg.recv(x, MPI.ANY_SOURCE)
        mg.waitall([fourth, third])
        first, second = mg.irecv(x, MPI.ANY_SOURCE), mg.irecv(big, 1)
        mg.wait(first)
        mg.wait(second)
    else:
        for message in (x, y, big, y, x, x, big):
            mg.send(message, 0)


def pytrees_that_travel_alike():
    """Leaves of one dtype are one message, in any container and in any order with others."""
    n = jnp.arange(2)
    if rank == 0:
        mg.send([x, n, y], 1)
        mg.send((n, {"a": x, "b": y}), 1)
        mg.send([x, n], 1)
        mg.send([x, y], 1)
        mg.wait(mg.isend([x, None, y], 1))
        mg.sendrecv([x, n, y], 1, 1, like=big)
    else:
        mg.recv({"a": x, "b": y, "n": n}, 0)
        mg.recv([x, y, n], 0, 0)
        mg.recv(x, 0, 0)
        mg.recv(n, 0, 0)
        mg.recv(jnp.ones(5), 0)
        mg.wait(mg.irecv((x, y), 0))
        mg.sendrecv(big, 0, 0, like=(n, x, y))
    mg.allreduce({"a": x, "b": y if rank else np.ones(2, "float32"), "c": 1.0})


def a_users_own_operation_beside_messages_of_the_same_tag():
    def swap(x, comm):
        y = np.empty_like(x)
        comm.Sendrecv(x, 1 - rank, recvbuf=y, source=MPI.ANY_SOURCE)
        return y

    def f(x):
        request = mg.irecv(x, 1 - rank)
        going = mg.isend(5 * x, 1 - rank)
        y = mg.custom_operation(swap, swap)(x)
        mg.wait(going)
        return jnp.sum(100 * y + mg.wait(request))

    np.testing.assert_array_equal(mg.grad(f)(x), 105 * x)


an_error_of_a_session_within_the_program_under_another_hook()
two_spellings_of_a_barrier()
a_sender_that_needs_the_progress_of_a_rank_in_a_barrier()
a_sender_that_needs_the_progress_of_a_rank_in_a_sum()
the_same_with_calls_of_mpi4py()
a_message_before_many_others()
a_receive_of_any_tag_after_a_posted_one()
receives_after_one_posted_for_anyone()
pytrees_that_travel_alike()
a_users_own_operation_beside_messages_of_the_same_tag()
mg.barrier()
if rank == 0:
    print("all let go")
