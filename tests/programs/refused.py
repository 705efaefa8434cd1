"""Wrong programs that the guard rejects on every rank, run by one job of 3 ranks.

The arguments are the names of the programs to run, by default all. Each takes a communicator of its
own. What every rank gets is printed by rank 0, as JSON.
"""

import json
import os
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg

world = MPI.COMM_WORLD
rank = world.rank
x = jnp.ones(3) * (rank + 1)
right, left = (rank + 1) % 3, (rank - 1) % 3
CASES = []


def case(f):
    CASES.append(f)
    return f


# ---- collectives ----


@case
def another_operation(comm):
    if rank == 1:
        mg.bcast(x, comm=comm)
    else:
        mg.allreduce(x, comm=comm)


@case
def another_root(comm):
    mg.reduce(x, root=0 if rank < 2 else 1, comm=comm)


@case
def another_dtype(comm):
    mg.allreduce(x.astype("int32") if rank == 1 else x, comm=comm)


@case
def another_shape(comm):
    mg.gather(jnp.ones((2, 3) if rank == 0 else (3, 2)), comm=comm)


@case
def another_reduction(comm):
    mg.scan(x, op=MPI.MAX if rank == 1 else MPI.PROD, comm=comm)


@case
def another_location(comm):
    mg.allreduce(x, op=MPI.MINLOC if rank == 2 else MPI.MAXLOC, comm=comm)


@case
def another_reduction_of_rows(comm):
    mg.reduce_scatterv(jnp.ones(3), [1, 0, 2], op=MPI.MAX if rank == 0 else MPI.MIN, comm=comm)


@case
def another_function(comm):
    def larger(a, b):
        return jnp.maximum(a, b)

    def smaller(a, b):
        return jnp.minimum(a, b)

    mg.reduce(x, op=mg.reduction(larger if rank == 0 else smaller), comm=comm)


@case
def another_root_of_a_product(comm):
    mg.reduce(x, op=MPI.PROD, root=rank // 2, comm=comm)


@case
def another_order(comm):
    if rank == 2:
        mg.barrier(comm)
        mg.allreduce(x, comm=comm)
    else:
        mg.allreduce(x, comm=comm)
        mg.barrier(comm)


@case
def left_out_by_one_rank(comm):
    if rank != 1:
        mg.allreduce(x, comm=comm)
    mg.barrier(comm)


@case
def mixed_with_messages(comm):
    if rank == 0:
        mg.recv(x, 1, comm=comm)
    mg.barrier(comm)


@case
def of_mpi4py(comm):
    if rank == 0:
        comm.mpi.allreduce(1)
    else:
        mg.barrier(comm)


@case
def making_a_communicator_on_some_ranks_only(comm):
    if rank == 0:
        comm.split(0)
    else:
        mg.barrier(comm)


@case
def duplicating_a_communicator_on_some_ranks_only(comm):
    if rank == 0:
        comm.dup()
    else:
        mg.barrier(comm)


@case
def while_a_rank_is_elsewhere(comm):
    """The others get three errors meanwhile, and this rank gets one in its next operation."""
    texts = []
    time.sleep(3 * (rank == 2))
    for _ in range(1 if rank == 2 else 3):
        try:
            mg.allreduce(jnp.ones(3 + rank), comm=comm)
        except Exception as error:
            texts.append(str(error))
    time.sleep(3 * (rank != 2))
    assert mg.allreduce(1.0, comm=comm) == 3
    assert len(texts) == (1 if rank == 2 else 3)
    raise RuntimeError(texts[0])


# ---- messages ----


@case
def message_of_another_dtype(comm):
    if rank == 0:
        mg.send(x, 1, comm=comm)
    if rank == 1:
        mg.recv(x.astype("int32"), 0, comm=comm)
    mg.barrier(comm)


@case
def tagged_message_of_another_dtype(comm):
    if rank == 0:
        mg.send(x, 1, tag=7, comm=comm)
    if rank == 1:
        mg.recv(x.astype("int32"), 0, tag=7, comm=comm)
    mg.barrier(comm)


@case
def message_of_another_shape(comm):
    like = jnp.ones((2, 3) if rank == 0 else (3, 2))
    mg.sendrecv(like, right, left, comm=comm)


@case
def other_leaves_of_the_same_length(comm):
    mg.bcast([x, x[:2]] if rank < 2 else [x[:2], x], comm=comm)


@case
def another_leaf_deep_in_a_tree(comm):
    layers = [jnp.ones((2, 2))] * 9
    mg.allreduce([*layers, jnp.ones((1, 4) if rank else 4)], comm=comm)


@case
def other_names_of_leaves(comm):
    mg.allreduce({"a": x, "b" if rank else "c": x}, comm=comm)


@case
def another_name_of_one_leaf(comm):
    mg.allreduce({"a" if rank else "b": x}, comm=comm)


@case
def another_dtype_in_the_twentieth_sum(comm):
    for n in range(40):
        mg.allreduce(x.astype(int) if n == 19 and rank == 1 else x, comm=comm)


@case
def message_of_other_leaves(comm):
    if rank == 0:
        mg.send([x, x[:1]], 1, comm=comm)
    elif rank == 1:
        mg.recv([x[:2], x[:2]], 0, comm=comm)
    mg.barrier(comm=comm)


@case
def request_of_other_leaves(comm):
    if rank == 2:
        mg.wait(mg.isend([x, x[:1]], 0, comm=comm))
    elif rank == 0:
        mg.wait(mg.irecv([x[:1], x], 2, comm=comm))
    mg.barrier(comm=comm)


@case
def window_of_other_leaves(comm):
    window = [jnp.ones((2, 1)), jnp.ones((2, 3))]
    mg.one_sided(window if rank else window[::-1], get=[(0, 0, 1)], comm=comm)


@case
def message_with_another_tag(comm):
    if rank == 0:
        mg.send(x, 1, tag=1, comm=comm)
    if rank == 1:
        mg.recv(x, 0, tag=2, comm=comm)
    mg.barrier(comm)


@case
def message_to_another_rank(comm):
    if rank == 0:
        mg.send(x, 2, comm=comm)
    if rank == 1:
        mg.recv(x, 0, comm=comm)
    mg.barrier(comm)


@case
def message_left_out(comm):
    if rank == 0:
        mg.send(x, 1, comm=comm)
    if rank == 1:
        mg.recv(x, 0, comm=comm)
        mg.recv(x, 0, comm=comm)
    mg.barrier(comm)


@case
def all_receive_first(comm):
    mg.recv(x, left, comm=comm)
    mg.send(x, right, comm=comm)


@case
def all_send_long_messages_first(comm):
    mg.send(jnp.ones(100_000), right, comm=comm)
    mg.recv(jnp.ones(100_000), left, comm=comm)


@case
def a_ring_with_a_wrong_source(comm):
    mg.sendrecv(x, right, left if rank else right, comm=comm)
    mg.barrier(comm)


@case
def to_itself_without_a_send(comm):
    if rank == 0:
        mg.recv(x, 0, comm=comm)
    mg.barrier(comm)


@case
def from_anyone_another_length(comm):
    if rank == 0:
        mg.recv(x, comm=comm)
    if rank == 1:
        mg.send(jnp.ones(4), 0, tag=5, comm=comm)
        time.sleep(1)  # it may still send another, which would come too late
    mg.barrier(comm)


@case
def from_anyone_whose_partner_waits(comm):
    rows = jnp.ones((1, 20_000))
    if rank == 0:
        mg.recv(rows, comm=comm)
    if rank == 1:  # waits for rank 0, so that rank 2 waits, too
        mg.neighbor_alltoallv(jnp.ones((2, 20_000)), [0, 2], [1, 1], [1, 0], comm=comm)
    if rank == 2:
        mg.neighbor_alltoallv(rows, [0, 1], [1, 0], [0, 1], comm=comm)


@case
def neighbors_with_other_counts(comm):
    if rank < 2:
        rows = jnp.ones((2, 3))
        mg.neighbor_alltoallv(rows, [1 - rank], [2], [2 + rank], comm=comm)
    mg.barrier(comm)


# ---- inside other programs ----


@case
def inside_scan(comm):
    def step(y, _):
        return mg.allreduce(y, comm=comm), None

    mg.jit(lambda y: jax.lax.scan(step, y, length=3 + (rank == 1))[0])(x)
    mg.barrier(comm)


@case
def inside_cond(comm):
    mg.jit(
        lambda y: jax.lax.cond(
            jnp.all(y < 2),
            lambda y: mg.bcast(y, 0, comm=comm),
            lambda y: mg.bcast(y, 1, comm=comm),
            y,
        )
    )(x)


@case
def after_jit_cache_hits(comm):
    f = mg.jit(lambda y: mg.allreduce(y, comm=comm))
    for _ in range(3):
        f(x)
    f(jnp.ones(4) if rank == 1 else x)


@case
def under_vmap(comm):
    batch = jnp.ones((2 + (rank == 0), 3))
    mg.vmap(lambda y: mg.allreduce(y, comm=comm))(batch)


@case
def on_a_part_of_the_ranks(comm):
    part = comm.split(rank // 2)
    mg.bcast(x, root=0 if rank == 2 else rank, comm=part)


@case
def two_communicators_in_another_order(comm):
    other = comm.dup()
    first, second = (comm, other) if rank else (other, comm)
    mg.allreduce(x, comm=first)
    mg.allreduce(x, comm=second)


# ---- derivatives ----


@case
def pulled_back_on_one_rank_only(comm):
    y, back = mg.vjp(lambda y: mg.allreduce(y, comm=comm), x)
    if rank == 0:
        back(y)
    mg.barrier(comm)


@case
def pulled_back_in_another_order(comm):
    back_f = mg.vjp(lambda y: mg.allreduce(y, comm=comm), x)[1]
    back_g = mg.vjp(lambda y: mg.bcast(y, comm=comm), x)[1]
    for back in (back_f, back_g) if rank else (back_g, back_f):
        back(x)


@case
def plain_grad_with_a_constant_on_one_rank(comm):
    c = np.ones(3)
    jax.grad(lambda y: jnp.sum(mg.allreduce(y if rank == 0 else c, comm=comm) ** 2))(x)
    mg.barrier(comm)


@case
def adjoint_message_left_out(comm):
    def f(y):
        if rank == 0:
            mg.send(y, 1, comm=comm)
        if rank == 1:
            y = mg.recv(y, 0, comm=comm)
        return y

    y, back = mg.vjp(f, x)
    if rank == 0:
        back(y)
    mg.barrier(comm)


@case
def second_derivative_on_one_rank_only(comm):
    def loss(y):
        return jnp.sum(mg.allreduce(y, comm=comm) ** 3)

    g = mg.grad(loss)
    if rank == 2:
        mg.jvp(g, (x,), (x,))
    else:
        g(x)
    mg.barrier(comm)


@case
def adjoint_inside_scan(comm):
    def loss(y, n):
        step = lambda y, _: (mg.allreduce(y, comm=comm) / 3, None)
        return jnp.sum(jax.lax.scan(jax.checkpoint(step), y, length=n)[0])

    _, back = mg.vjp(lambda y: loss(y, 3), x)
    _, shorter = mg.vjp(lambda y: loss(y, 2), x)
    (shorter if rank == 0 else back)(jnp.float32(1))
    mg.barrier(comm)


# ---- counts ----


@case
def gatherv_with_other_counts(comm):
    mg.gatherv(jnp.ones((1, 2)), [1, 1, 2] if rank == 0 else [1, 1, 1], comm=comm)


@case
def scatterv_with_other_counts(comm):
    mg.scatterv(jnp.ones((4, 2)), [1, 1, 2] if rank < 2 else [1, 2, 1], comm=comm)


@case
def allgatherv_with_other_counts(comm):
    mg.allgatherv(jnp.ones((2, 2)), [2, 2, 2] if rank < 2 else [2, 1, 2], comm=comm)


@case
def alltoallv_with_other_counts(comm):
    mg.alltoallv(jnp.ones((3, 2)), [1, 1, 1], [1, 2, 1] if rank == 0 else [1, 1, 1], comm=comm)


@case
def reduce_scatterv_with_other_counts(comm):
    mg.reduce_scatterv(jnp.ones((4, 2)), [1, 1, 2] if rank == 0 else [1, 2, 1], comm=comm)


# ---- requests ----


@case
def request_of_another_shape(comm):
    arriving = mg.irecv(jnp.ones(3 if rank else 2), left, comm=comm)
    mg.waitall([arriving, mg.isend(x, right, comm=comm)])
    mg.barrier(comm)


@case
def request_whose_partner_posts_none(comm):
    if rank == 0:
        mg.wait(mg.irecv(x, 1, comm=comm))
    mg.barrier(comm)


@case
def requests_waited_for_before_the_send(comm):
    y = mg.wait(mg.irecv(x, left, comm=comm))
    mg.wait(mg.isend(y, right, comm=comm))


# ---- operations written with mpi4py ----


@case
def after_a_custom_operation_on_one_rank(comm):
    """The guard accepts this: it need not be collective, and is not counted."""
    alone = mg.custom_operation(lambda v, mpi: 2 * v, lambda v, mpi: 2 * v)
    mg.allreduce(alone(x, comm) if rank == 0 else x, op=MPI.MAX if rank else MPI.SUM, comm=comm)


# ---- processes and threads ----


@case
def from_a_forked_process(comm):
    warnings.simplefilter("ignore")  # JAX warns, too
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            mg.allreduce(x, comm=comm)
        except Exception as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    text = os.read(reader, 10000).decode()
    os.wait()
    mg.barrier(comm)  # the rank itself goes on
    raise RuntimeError(text)


@case
def from_two_threads(comm):
    messages = []

    def second():
        time.sleep(0.3)
        try:
            mg.allreduce(x, comm=comm)
        except Exception as error:
            messages.append(str(error))

    if rank == 0:
        thread = threading.Thread(target=second)
        thread.start()
        mg.recv(x, 1, comm=comm)
        thread.join()
    if rank == 1:
        time.sleep(1.0)
        mg.send(x, 0, comm=comm)
    mg.barrier(comm)  # the rank itself goes on
    if messages:
        raise RuntimeError(messages[0])


@case
def waiting_in_a_second_thread(comm):
    messages = []
    request = mg.isend(x, rank, comm=comm)
    mg.recv(x, rank, comm=comm)
    mg.wait(request)

    def second():
        time.sleep(0.3)
        try:
            mg.wait(request)  # the list of requests is not touched
        except Exception as error:
            messages.append(str(error))

    if rank == 0:
        thread = threading.Thread(target=second)
        thread.start()
        mg.recv(x, 1, comm=comm)
        thread.join()
    if rank == 1:
        time.sleep(1.0)
        mg.send(x, 0, comm=comm)
    mg.barrier(comm)
    if messages:
        raise RuntimeError(messages[0])


plain = MPI.COMM_WORLD.Dup()


def main():
    results = {}
    for f in CASES:
        if sys.argv[1:] and f.__name__ not in sys.argv[1:]:
            continue
        comm = mg.Communicator(plain)  # made unseen by the guard: a refused rank is not awaited
        start, text = time.monotonic(), ""
        try:
            f(comm)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start
        results[f.__name__] = world.gather((text, seconds))
    if rank == 0:
        print(json.dumps(results))


main()
