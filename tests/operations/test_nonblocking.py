"""isend, irecv, wait, waitall: what the cases of helpers.py leave out."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI

import mpigrad as mg
from helpers import close
from launching import run
from mpigrad.communicator import Communicator
from mpigrad.guard.failure import current_board
from product_space import prove, prove_second_order


def pipeline(x: Any, c: Communicator) -> Any:
    """A message posted in one iteration of a loop and waited for in the next."""
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    post = lambda x: (mg.irecv(x, left, comm=c), mg.isend(x, right, comm=c))

    def body(under_way: Any, _: None) -> Any:
        y = 2 * jnp.sin(mg.waitall(under_way)[0])
        return post(y), y

    under_way, ys = jax.lax.scan(body, post(x), None, length=3)
    return mg.waitall(under_way)[0] + ys.sum(0)


def pipeline_simulated(X: Any) -> Any:
    total = 0
    for _ in range(3):
        X = 2 * jnp.sin(jnp.roll(X, 1, axis=0))
        total = total + X
    return total + jnp.roll(X, 1, axis=0)


@pytest.mark.cases("vmap", "checkpoint(scan)", reason="both are compiled as jit is")
@pytest.mark.parametrize("how", ["jit", "vmap", "checkpoint(scan)"])
def test_value_gradient_and_dot_product(how: str, comm: Communicator) -> None:
    prove(lambda x: pipeline(x, comm), pipeline_simulated, comm, how)


@pytest.mark.full("test_peer_faults has second derivatives of requests")
def test_second_order(comm: Communicator) -> None:
    prove_second_order(lambda x: pipeline(x, comm), pipeline_simulated, comm)


def test_pytrees(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    tree = lambda r: {
        "a": jnp.arange(3) + r,
        "b": (jnp.full((2, 2), 1.0 * r), jnp.ones(3) * r),
        "c": jnp.full(2, r, "bfloat16"),
        "d": jnp.array(r % 2 == 0),
    }
    request = mg.irecv(tree(0), left, comm=comm)
    other = mg.isend(tree(comm.rank), right, comm=comm)
    close(jax.tree.map(lambda x: x.astype("float64"), mg.wait(request)),
          jax.tree.map(lambda x: x.astype("float64"), tree(left)))  # fmt: skip
    assert mg.wait(other) is None


def test_vmap_of_an_empty_batch(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="got an empty batch"):
        mg.vmap(lambda x: mg.wait(mg.isend(x, comm.rank)))(jnp.ones((0, 3)))


def test_a_large_message_to_self(comm: Communicator) -> None:
    x = jnp.arange(1e6)
    request = mg.isend(x, comm.rank, comm=comm)
    close(mg.recv(x, comm.rank, comm=comm), x)
    mg.wait(request)


def test_waitall_keeps_the_order_of_requests_from_compiled_functions(comm: Communicator) -> None:
    """Their posts may have run in another order than they were traced in."""
    me = comm.rank
    first = mg.jit(lambda x: mg.isend(x * x, me, comm=comm))
    second = mg.jit(lambda x: mg.isend(jnp.sin(x), me, comm=comm))

    def f(x: Any) -> Any:
        total = 0.0
        for posts in ((first, second), (second, first)):
            requests = [post(x) for post in posts]
            total += jnp.sum(mg.recv(x, me, comm=comm) * mg.recv(x, me, comm=comm) ** 2)
            mg.waitall(requests)
        return total

    alone = lambda x: jnp.sum(x**2 * jnp.sin(x) ** 2 + jnp.sin(x) * x**4)
    x = jnp.arange(3.0) + comm.rank
    close(mg.grad(f)(x), jax.grad(alone)(x))


def test_requests_pass_compiled_functions(comm: Communicator) -> None:
    x = jnp.arange(3.0) + comm.rank
    post = mg.jit(lambda x: (mg.isend(x, comm.rank, comm=comm), mg.irecv(x, comm.rank, comm=comm)))
    finish = mg.jit(lambda requests: mg.waitall(requests)[1])
    first, second = post(x), post(2 * x)
    close(finish(second), 2 * x)  # the one that was posted second, though waited for first
    close(finish(first), x)


@pytest.mark.parametrize("how", ["posted", "blocking", "sent", "sendrecv"])
def test_adjoints_that_would_be_exchanged_are_refused(how: str, comm: Communicator) -> None:
    """Two messages of one partner and tag end in another order than they were posted in."""
    own = comm.dup()  # on which messages are left over
    me = {"comm": own}

    def two(x: Any) -> Any:
        if how == "sent":
            sends = [mg.isend(x, own.rank, **me), mg.isend(2 * x, own.rank, **me)]
            a, b = mg.recv(x, own.rank, **me), mg.recv(x, own.rank, **me)
            mg.wait(sends[1])
            mg.wait(sends[0])
            return jnp.sum(a + 3 * b)
        first = mg.irecv(x, own.rank, **me)
        other = mg.isend(x, own.rank, **me)
        if how == "sendrecv":
            b = mg.sendrecv(2 * x, own.rank, own.rank, **me)
        else:
            second = mg.irecv(x, own.rank, **me) if how == "posted" else None
            mg.send(2 * x, own.rank, **me)
            b = mg.recv(x, own.rank, **me) if second is None else mg.wait(second)
        a = mg.wait(first)
        mg.wait(other)
        return jnp.sum(a + 3 * b)

    x = jnp.ones(3)
    close(two(x), 21)
    close(mg.jvp(two, (x,), (x,))[1], 21)
    with pytest.raises(jax.errors.JaxRuntimeError, match="wait in the order of the posts"):
        mg.grad(two)(x)


def test_wrong_use(comm: Communicator) -> None:
    x = jnp.ones(3)
    request = mg.isend(x, MPI.PROC_NULL, comm=comm)
    mg.wait(request)
    board = current_board()
    assert board is not None
    mine = board.slots[board.own_index]
    known = int(mine["counts_invalid"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="already waited for"):
        mg.wait(request)
    assert int(mine["counts_invalid"]) == known  # the guard still proves what it proved
    outside = mg.isend(x, MPI.PROC_NULL, comm=comm)
    with pytest.raises(ValueError, match="Call post and wait in one function"):
        mg.grad(lambda x: (jnp.sum(x), mg.wait(outside))[0])(x)
    with pytest.raises(ValueError, match="isend: tag must be one tag, got the wildcard"):
        mg.isend(x, comm.rank, MPI.ANY_TAG)
    with pytest.raises(ValueError, match=r"int32 on .* Receive them by recv"):
        mg.irecv((x, jnp.int32(1)), MPI.ANY_SOURCE)
    request = mg.isend(x, MPI.PROC_NULL, comm=comm)
    with pytest.raises(TypeError, match="got a request of isend"):
        mg.wait_with_status(request)
    mg.wait(request)
    with pytest.raises(TypeError, match="request of isend or irecv"):
        mg.wait(x)  # type: ignore[arg-type]
    dropped = lambda x: (mg.isend(x, MPI.PROC_NULL, comm=comm), jnp.sum(x))[1]
    with pytest.raises(jax.errors.JaxRuntimeError, match="Wait for each request exactly once"):
        mg.grad(dropped)(x)


@pytest.mark.launcher
def test_forgotten_requests_are_named_at_exit() -> None:
    program = """
        import jax.numpy as jnp, mpigrad as mg
        for _ in range(2):
            mg.isend(jnp.ones(3), 0)
        mg.recv(jnp.ones(3), 0)
        print("the end")
    """
    done = run([sys.executable, "-c", textwrap.dedent(program)])
    assert "the end" in done.stdout
    assert done.stderr.count("nobody has waited for the request of isend") == 1, done.stderr
