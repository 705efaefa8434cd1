"""Receives from whoever sends: what the cases of helpers.py leave out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI
from scipy.sparse import diags_array

import mpigrad as mg
from helpers import close
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid, halo_exchange
from mpigrad.runtime.native import record
from mpigrad.sparse import PCG, GhostExchange, Jacobi, Matrix, solve
from product_space import batch, scan

CHECKPOINTS: dict[str, Callable[[Any], Any]] = {
    "not": lambda f: f,
    "checkpoint": jax.checkpoint,
    "nothing saveable": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.nothing_saveable
    ),
    "nested": lambda f: jax.checkpoint(
        lambda x: jax.tree.map(lambda y: y + 0 * x, jax.checkpoint(f)(x))
    ),
    "checkpoint(scan)": lambda f: jax.checkpoint(scan(f)),
    "scan(checkpoint)": lambda f: scan(jax.checkpoint(f)),
    "checkpoint(jit(vmap))": lambda f: jax.checkpoint(mg.jit(batch(f, mg.vmap))),
}


@pytest.mark.ranks(3)
@pytest.mark.cases("not", "scan(checkpoint)", reason="the others nest the same rules")
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_the_order_of_arrival_is_recorded(how: str, comm: Communicator) -> None:
    """Who comes first counts double, a matter of luck; derivatives follow what has happened.

    Recomputed under `checkpoint`, a message is not received again, from another rank perhaps.
    """

    def race(x: Any) -> Any:
        if comm.rank > 0:
            mg.send(x, 0, tag=comm.rank)
            mg.barrier()
            return 0 * x, jnp.zeros(2)
        (y, first, tag), z = mg.recv_with_status(x), mg.recv(x)
        mg.barrier()
        weights = jnp.where(first == jnp.array([1, 2]), 2, 1) + 0 * tag
        return 2 * y + z, weights * jax.lax.stop_gradient(x)  # x is 1 here, or 2 in loops

    gradient = mg.jit(mg.grad(CHECKPOINTS[how](race), has_aux=True))
    twice = 2 if "scan" in how else 1
    for attempt in range(3):
        comm.mpi.Barrier()
        time.sleep(0.02 * ((comm.rank + attempt) % 3))
        before = record().calls
        g, weights = gradient(jnp.float64(1))
        assert record().calls - before == twice * (5 if comm.rank == 0 else 3)
        expected = comm.mpi.bcast(np.asarray(weights))
        assert float(g) == (expected[comm.rank - 1] if comm.rank else 0)


@pytest.mark.ranks(3)
def test_derivatives_are_not_taken_for_messages_of_the_program(comm: Communicator) -> None:
    """Rank 1 already sends its adjoint to rank 0, which still waits for anything from rank 2."""

    def f(x: Any) -> Any:
        if comm.rank == 0:
            mg.send(x, 1)
            for _ in range(2):
                y, source, _ = mg.recv_with_status(x)
                x += y * source
            return x
        time.sleep(0.2 * (comm.rank - 1))
        mg.send(x, 0)
        return x * mg.recv(x, 0, tag=0) if comm.rank == 1 else x

    x = jnp.array([1.0, 2.0, 4.0])[comm.rank]
    gradient = mg.grad(f)(x)
    assert float(gradient) == [3.0, 2.0, 3.0][comm.rank]


def test_pytrees_and_dtypes_come_from_one_sender(comm: Communicator) -> None:
    tree = {"n": jnp.int32(comm.rank), "x": jnp.arange(3.0) + comm.rank, "b": jnp.array(True)}
    if comm.rank > 0:
        mg.send(tree, 0, tag=comm.rank)
        return
    seen = set()
    for _ in range(comm.size - 1):
        got, source, tag = mg.recv_with_status(jax.tree.map(jnp.zeros_like, tree))
        assert int(got["n"]) == int(source) == int(tag)
        assert source.dtype == tag.dtype == jnp.int32
        close(got["x"], jnp.arange(3.0) + int(source))
        seen.add(int(source))
    assert seen == set(range(1, comm.size))


def test_nobody_and_oneself(comm: Communicator) -> None:
    x = jnp.ones(3)
    value, source, tag = mg.recv_with_status(x, MPI.PROC_NULL)
    assert (int(source), int(tag)) == (MPI.PROC_NULL, MPI.ANY_TAG)
    close(value, jnp.zeros(3))
    mg.send(5 * x, comm.rank, tag=8)
    value, source, tag = mg.recv_with_status(x)
    assert (int(source), int(tag)) == (comm.rank, 8)
    close(value, 5 * x)


def test_posted_receives_tell_the_sender(comm: Communicator) -> None:
    """The requests of one rank are carried by a loop; their messages come in any order."""
    tree = (jnp.arange(3.0) + comm.rank, jnp.ones(2))
    if comm.rank > 0:
        mg.send(tree, 0, tag=comm.rank)
        return
    post = lambda: mg.irecv(tree, MPI.ANY_SOURCE, MPI.ANY_TAG)

    def body(request: Any, _: None) -> Any:
        (y, _), source, tag = mg.wait_with_status(request)
        return post(), (y, source, tag)

    request, (ys, sources, tags) = jax.lax.scan(body, post(), None, length=comm.size - 1)
    assert sources.dtype == tags.dtype == jnp.int32
    assert sorted(map(int, sources)) == list(range(1, comm.size))
    close(tags, sources)
    close(ys, jnp.arange(3.0) + sources[:, None])
    mg.send(tree, 0, tag=7)
    assert [int(n) for n in mg.wait_with_status(request)[1:]] == [0, 7]


def test_posted_receives_from_nobody_and_from_a_named_rank(comm: Communicator) -> None:
    x = jnp.ones(3)
    value, source, tag = mg.wait_with_status(mg.irecv(x, MPI.PROC_NULL, MPI.ANY_TAG))
    assert (int(source), int(tag)) == (MPI.PROC_NULL, MPI.ANY_TAG)
    close(value, jnp.zeros(3))
    request = mg.irecv(x, comm.rank, 4)
    mg.send(5 * x, comm.rank, 4)
    value, source, tag = mg.wait_with_status(request)
    assert (int(source), int(tag)) == (comm.rank, 4)
    close(value, 5 * x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("posted", [True, False])
def test_messages_of_inner_gradients_are_no_tangents(posted: bool, comm: Communicator) -> None:
    """Rank 1 sends a message, then an adjoint with the same tag; rank 0 takes the adjoint first."""

    def inner(z: Any) -> Any:
        if comm.rank == 0:
            mg.send(z, 1)
            return 0.0
        return jnp.sum(mg.recv(z, 0) ** 2)

    def f(x: Any) -> Any:
        request = None
        if comm.rank == 1:
            mg.send(5 * x, 0)
        elif posted:
            request = mg.irecv(x, MPI.ANY_SOURCE)
        g = mg.grad(inner)(x)
        if comm.rank == 1:
            return g, x
        return g, mg.recv(x, 1) if request is None else mg.wait(request)

    x, dx = jnp.arange(3.0) + comm.rank, jnp.full(3, 2.0 + comm.rank)
    other, dother = jnp.arange(3.0) + 1, jnp.full(3, 3.0)
    expected = [(2 * x, 5 * other), (0 * x, x)][comm.rank]
    tangents = [(2 * dx, 5 * dother), (0 * x, dx)][comm.rank]
    for got in (mg.jvp(f, (x,), (dx,)), mg.jit(lambda x: mg.jvp(f, (x,), (dx,)))(x)):
        close(got, (expected, tangents))
    weighted = lambda x: jnp.vdot(f(x)[0], jnp.sin(x)) + jnp.sum(jnp.cos(f(x)[1]))
    simulated = lambda X: (
        jnp.vdot(2 * X[0], jnp.sin(X[0])) + jnp.sum(jnp.cos(5 * X[1]) + jnp.cos(X[1]))
    )
    X = jnp.stack([jnp.arange(3.0), other])
    close(mg.grad(weighted)(x), jax.grad(simulated)(X)[comm.rank])


@pytest.mark.thin(1)
@pytest.mark.cases(
    *("posted", "inside a linear map"), reason="the others receive as `inside a linear map` does"
)
@pytest.mark.parametrize("later", ["received", "posted", "from anyone", "inside a linear map"])
def test_tangents_that_would_be_exchanged_are_refused(later: str, comm: Communicator) -> None:
    """The message after it from the same rank with the same tag is received before the wait."""
    own = comm.split(comm.rank)  # on which messages are left over
    me = {"comm": own}

    def two(x: Any) -> Any:
        first = mg.irecv(x, MPI.ANY_SOURCE, 3, **me)
        if later == "inside a linear map":
            mg.send(x, own.rank, 3, **me)
            b = mg.linearize(lambda x: mg.sendrecv(x, 0, 0, 3, 3, **me), 2 * x)[1](2 * x)
            return jnp.sum(mg.wait(first) + 3 * b)
        if later == "posted":
            second = mg.irecv(x, own.rank, 3, **me)
        mg.send(x, own.rank, 3, **me)
        mg.send(2 * x, own.rank, 3, **me)
        if later == "posted":
            a = mg.wait(first)
            return jnp.sum(a + 3 * mg.wait(second))
        b = mg.recv(x, own.rank if later == "received" else MPI.ANY_SOURCE, 3, **me)
        return jnp.sum(mg.wait(first) + 3 * b)

    x = jnp.ones(3)
    close(two(x), 21)
    if later == "posted":  # adjoints go back in order
        close(mg.grad(two)(x), 7 * x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="tangents could be exchanged"):
        mg.jvp(two, (x,), (x,))
    for linear in (mg.linearize(two, x)[1], mg.jit(lambda t: mg.linearize(two, x)[1](t))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="tangents could be exchanged"):
            linear(x)
    if later != "posted":
        with pytest.raises(jax.errors.JaxRuntimeError, match="wait in the order of the posts"):
            mg.grad(two)(x)


def test_a_posted_receive_takes_only_messages_of_the_program(comm: Communicator) -> None:
    """Not what moves fields, makes ghost exchanges and matrices, and multiplies meanwhile."""
    grid = Grid((6, 4), (1.0, 1.0), comm)
    rows = diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(6, 6), format="csr")
    posted = mg.irecv(jnp.zeros(2), MPI.ANY_SOURCE, MPI.ANY_TAG, comm)
    whole = grid.gather(grid.scatter(np.arange(24.0).reshape(6, 4) if comm.rank == 0 else None))
    ghosts = GhostExchange(2, [2 * comm.size - 1], comm)
    assert ghosts.exchange(jnp.arange(2.0)).tolist() == [1]
    A = Matrix.from_scipy(rows if comm.rank == 0 else None, comm=comm, root=0)
    back = (A @ A).to_scipy()
    n = A.pattern.n_local
    solved = solve(A, jnp.ones(n), PCG(preconditioner=Jacobi())).value
    halo_exchange(jnp.ones(grid.local_shape), grid)
    mg.send(jnp.full(2, float(comm.rank)), (comm.rank + 1) % comm.size, comm.rank, comm)
    received, source, tag = mg.wait_with_status(posted)
    before = (comm.rank - 1) % comm.size
    assert (int(source), int(tag), received.tolist()) == (before, before, [before] * 2)
    close(A @ solved, np.ones(n), 1e-6)
    if comm.rank == 0:
        assert whole is not None and np.array_equal(whole.ravel(), np.arange(24))
        assert back is not None and abs(back - rows @ rows).max() == 0
