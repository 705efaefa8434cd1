"""Solves that fail to converge, between messages of the program."""

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import mpigrad as mg  # noqa: E402
from mpigrad.guard.failure import current_board  # noqa: E402
from mpigrad.guard.lifecycle import unreceived_report  # noqa: E402
from mpigrad.sparse import PCG, BoomerAMG, Jacobi, Matrix, Pattern, solve  # noqa: E402
from mpigrad.sparse.solvers.libraries import hypre_available  # noqa: E402

world = mg.default_communicator()
rank, n = world.rank, 30
rows = n * rank + np.arange(n)
i, j = np.concatenate([(rows, rows), (rows, rows - 1), (rows, rows + 1)], axis=1)
inside = (j >= 0) & (j < n * world.size)
pattern = Pattern.from_coo(i[inside], j[inside], n, world)
A = Matrix(pattern, jnp.where((i == j)[inside], 2.0, -1.0))
b = jnp.ones(n)


def ring():
    assert mg.sendrecv(jnp.float64(rank), 1 - rank, 1 - rank) == 1 - rank


def say(*words):
    if rank == 0:
        print(*words, flush=True)


def left():
    mg.barrier()
    text = unreceived_report(current_board().slots)
    mg.barrier()
    return text


for preconditioner in [Jacobi()] + [BoomerAMG()] * hypre_available():
    solver = PCG(rtol=1e-14, max_steps=2, preconditioner=preconditioner)
    assert mg.jit(lambda b, s=solver: solve(A, b, s, throw=False).result)(b) != 0
    ring()
assert not left()
if rank == 0:
    mg.send(b, 1, tag=1)
assert "1 message to rank 1 (tag 1)" in left()  # nothing has failed: all messages count
if rank == 1:
    mg.recv(b, 0, tag=1)

board = current_board()
for preconditioner in [Jacobi()] + [BoomerAMG()] * hypre_available():
    solver = PCG(rtol=1e-14, max_steps=2, preconditioner=preconditioner)

    board.slots[board.own_index]["failure_seen"] = 0  # of each solve by itself

    @mg.jit
    def message_around_a_solve(b, solver=solver):
        if rank == 0:
            mg.send(b, 1, tag=2)
        x = solve(A, b, solver).value
        return mg.recv(x, 0, tag=2) if rank == 1 else x

    try:
        jax.block_until_ready(message_around_a_solve(b))
    except jax.errors.JaxRuntimeError as error:
        say(type(preconditioner).__name__, str(error))
    ring()
    assert board.slots[board.own_index]["failure_seen"]
say("ends")
