"""Programs with typical mistakes: `broken.py NAME` runs the program of that name."""

import os
import pathlib
import resource
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg

rank = MPI.COMM_WORLD.rank
x = jnp.ones(3) * (rank + 1)


def one_rank_raises():
    if rank == 1:
        raise ArithmeticError("the mesh of rank 1 is empty")
    mg.barrier()


def one_rank_raises_inside_jit():
    @mg.jit
    def f(x):
        y = mg.allreduce(x)
        if rank == 1:
            mg.require(jnp.all(x < 0), "x is {}, not negative", x[0])
        return mg.allreduce(y)

    f(x)


def longer_message_on_a_communicator_in_another_order():
    comm = mg.default_communicator().split(0, key=-rank)
    if comm.rank == 0:
        mg.send(jnp.ones(5), 1, comm=comm)
    else:
        mg.recv(jnp.ones(3), 0, comm=comm)
    mg.barrier()


def one_rank_raises_under_another_hook():
    sys.excepthook = lambda kind, error, trace: print("as this hook has it:", error)
    one_rank_raises()


def longer_message_than_expected():
    if rank == 0:
        mg.send(jnp.ones(5), 1)
    else:
        mg.recv(jnp.ones(3), 0)
    mg.barrier()


def another_operation_that_mpi_takes_for_this():
    def step(y, i):
        other = (i == 7) & (rank == 1)
        return jax.lax.cond(other, lambda y: mg.bcast(y, 1), lambda y: mg.allreduce(y) / 2, y), None

    mg.jit(lambda y: jax.lax.scan(step, y, jnp.arange(10))[0])(x)
    if rank == 0:
        mg.send(x, 1)
    else:
        mg.recv(x, 0)


def leaves_of_other_lengths():
    if rank == 0:
        mg.send({"a": jnp.ones(3), "b": jnp.ones(2)}, 1)
    else:
        mg.recv({"a": jnp.ones(2), "b": jnp.ones(3)}, 0)
    mg.barrier()


def halos_of_another_dtype():
    grid = mg.Grid((4,), (1.0,))
    mg.halo_exchange(jnp.ones(2, "int32" if rank else "float32"), grid, 1)


def message_of_other_leaves():
    if rank == 0:
        mg.send([x, x[:1]], 1)
    else:
        mg.recv([x[:2], x[:2]], 0)
    mg.barrier()


def one_rank_leaves_out_an_allreduce():
    if rank == 0:
        mg.allreduce(x)
    mg.sendrecv(x, 1 - rank, 1 - rank)


def both_receive_first():
    mg.recv(x, 1 - rank)
    mg.send(x, 1 - rank)


def wrong_tag():
    if rank == 0:
        mg.send(x, 1, tag=1)
        mg.barrier()
    else:
        mg.recv(x, 0, tag=2)
        mg.barrier()


def a_message_that_nobody_receives():
    if rank == 0:
        mg.send(x, 1)
        mg.send(2 * x, 1)
    else:
        mg.recv(x, 0)
    mg.barrier()


def one_rank_makes_no_communicator():
    if rank == 0:
        mg.default_communicator().split(0)
    else:
        mg.barrier()


def plain_jax_grad_with_a_constant_on_one_rank():
    f = lambda x: jnp.sum(mg.allreduce(x if rank == 0 else jnp.ones(3)) ** 2)
    jax.grad(f)(x)


def pull_back_on_one_rank_only():
    y, back = mg.vjp(lambda x: mg.allreduce(x), x)
    if rank == 0:
        back(y)
    else:
        mg.barrier()


def one_rank_ends():
    if rank == 0:
        mg.allreduce(x)


def one_rank_exits():
    if rank == 1:
        sys.exit(3)
    mg.barrier()


def one_rank_computes_for_ever():
    mg.barrier()
    while rank == 1:
        time.sleep(1)
    mg.allreduce(x)


def one_rank_is_stopped():
    mg.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    mg.allreduce(x)


def one_rank_runs_out_of_memory():
    if rank == 1:
        np.ones(1 << 50)
    mg.barrier()


def one_rank_has_no_memory_for_threads():
    if rank == 1:
        size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)
        raise MemoryError([np.ones(1 << 20) for _ in range(100)])
    mg.barrier()


def an_error_in_words_of_no_encoding():
    if rank == 1:
        raise ValueError(f"no mesh {os.fsdecode(bytes([255]))}")
    mg.barrier()


def killed():
    if rank == 1:
        time.sleep(2)  # MPICH's mpiexec may lose what was printed just before
        os.kill(os.getpid(), signal.SIGKILL)
    mg.barrier()


def terminated():
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    mg.barrier()


def in_a_solver_written_with_mpi4py():
    if rank == 0:
        mg.default_communicator().mpi.recv(source=1)
    mg.barrier()


def in_a_reduction_of_objects():
    def forward(v, comm):
        if rank == 1:
            raise ValueError("not here")
        return comm.allreduce(v)

    try:
        mg.custom_operation(forward, forward)(x)
    except jax.errors.JaxRuntimeError:
        time.sleep(60)


def one_rank_fails_and_meets_the_others_in_finally():
    try:
        if rank == 1:
            raise ArithmeticError("the mesh of rank 1 is empty")
        mg.allreduce(x)
    finally:
        mg.barrier()


def ends_while_a_thread_sends():
    def for_ever():
        while True:
            mg.allreduce(x)

    threading.Thread(target=for_ever, daemon=True).start()
    time.sleep(1)


def a_refused_thread_beside_one_that_waits():
    if rank == 0:
        waits = threading.Thread(target=lambda: mg.allreduce(x), daemon=True)  # nobody else comes
        waits.start()
        time.sleep(1)
        for operation in (lambda: mg.allreduce(x), mg.default_communicator().mpi.barrier):
            try:
                operation()
            except RuntimeError as error:
                print(error, file=sys.stderr)
    time.sleep(60)


def windows_with_rows_of_other_lengths():
    mg.one_sided(jnp.ones((2, 3 + rank)))


def another_root():
    mg.bcast(x, root=rank)


def messages_of_two_kinds_in_a_loop():
    step = lambda y, _: (mg.sendrecv(y, 1 - rank, 1 - rank), None)
    mg.jit(lambda y: jax.lax.scan(step, y, length=4 + rank)[0])(x)
    mg.barrier()


def a_request_that_nobody_posts():
    if rank == 0:
        mg.wait(mg.irecv(x, 1))
    mg.barrier()


def a_send_request_that_nobody_receives():
    if rank == 0:
        mg.wait(mg.isend(jnp.ones(100_000), 1))
    mg.barrier()


def a_wildcard_request_that_nobody_posts():
    if rank == 0:
        mg.wait(mg.irecv(x, MPI.ANY_SOURCE, MPI.ANY_TAG))
    mg.barrier()


def tangents_of_opposite_long_sends():
    def f(x):
        request = mg.irecv(x, MPI.ANY_SOURCE)
        mg.send(x, 1 - rank)
        return mg.wait(request)

    long = jnp.ones(20000)
    jax.block_until_ready(mg.vjp(f, long)[1](long))  # goes back as it came
    mg.jvp(f, (long,), (long,))


def waits_in_another_order_than_posts():
    def f(x):
        if rank == 0:
            first, second = mg.irecv(x, 1), mg.irecv(x, 1)
            return mg.wait(second) + 2 * mg.wait(first)
        mg.send(x, 0)
        mg.send(x, 0)
        return x

    mg.jit(lambda x: mg.vjp(f, x)[1](x))(x)


def requests_of_other_shapes():
    if rank == 0:
        mg.wait(mg.isend(jnp.ones(5), 1))
    else:
        mg.wait(mg.irecv(jnp.ones(3), 0))
    mg.barrier()


def requests_waited_for_before_what_they_wait_for():
    request = mg.irecv(x, 1 - rank)
    y = mg.wait(request)
    mg.send(y, 1 - rank)


def requests_and_blocking_messages_in_another_order():
    """Each rank waits for the answer to a message that it has not sent."""
    if rank == 0:
        request = mg.irecv(x, 1, tag=1)
        mg.recv(x, 1, tag=2)
        mg.wait(request)
        mg.send(x, 1, tag=3)
    else:
        request = mg.irecv(x, 0, tag=3)
        mg.send(x, 0, tag=1)
        mg.wait(request)
        mg.send(x, 0, tag=2)


def more_rows_than_the_root_counts():
    mg.gatherv(jnp.ones((2, 3)), [2, 1] if rank == 0 else [2, 2])


def fewer_rows_than_others_count():
    """MPI accepts a message that is too short without an error."""
    mg.gatherv(jnp.ones((2 - rank, 3)), [2, 2 - rank])
    mg.scatterv(jnp.ones((4, 3)), [2, 2] if rank == 0 else [1, 3])
    mg.reduce_scatterv(jnp.ones((4, 3)), [2, 2] if rank == 0 else [1, 3])


def alltoallv_with_other_counts():
    sends, receives = ([1, 2], [1, 1]) if rank == 0 else ([2, 1], [2, 1])
    mg.alltoallv(jnp.ones((3, 3)), sends, receives)


def custom_that_receives_what_nobody_sends():
    def forward(v, comm):
        comm.Recv(v, (comm.rank + 1) % comm.size)
        return v

    mg.custom_operation(forward, forward)(x)


def custom_that_raises_on_one_rank():
    def forward(v, comm):
        if comm.rank == 1:
            raise ValueError("not here")
        return v

    mg.custom_operation(forward, forward)(x)
    mg.barrier()


def custom_on_one_rank_only():
    operation = mg.custom_operation(lambda v, comm: comm.allreduce(v), lambda v, comm: v)
    if rank == 0:
        operation(x)
    mg.barrier()


def output_that_nobody_takes():
    sys.stdout = sys.stderr = open("/dev/full", "w")  # noqa: SIM115
    print("hello")  # fails when it is flushed
    mg.recv(x, 1 - rank)


def one_rank_exits_with_256():
    if rank == 1:
        sys.exit(256)  # 0 to a shell: a status of os.wait
    mg.barrier()


def one_rank_is_stopped_at_the_end():
    mg.allreduce(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def one_rank_never_ends():  # a thread waits for an event
    if rank == 1:
        threading.Event().wait()


def grids_of_ranks_that_differ():
    mg.default_communicator().cartesian((2,), periods=rank == 1)


def an_operation_in_a_custom_operation():
    def forward(v, comm):
        return np.asarray(mg.allreduce(v))

    mg.custom_operation(forward, forward)(x)


def an_operation_after_the_end_of_mpi():
    MPI.Finalize()
    mg.barrier()


if rank == 0:
    print(time.monotonic(), flush=True)
mg.barrier()
globals()[sys.argv[1]]()
