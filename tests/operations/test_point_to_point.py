"""send, recv, sendrecv: packed pytrees, messages to self, different shapes, dtypes and tags."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad as mg
from helpers import close
from mpigrad.communicator import Communicator
from mpigrad.runtime.native import record
from product_space import TRANSFORMED, TRANSFORMS, operand, prove, prove_second_order


def both_ways(x: Any, c: Communicator) -> Any:
    """The ring to the right carries two rows in float32, the one to the left other tags."""
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    got = mg.sendrecv(
        {"a": x[:2].astype("float32"), "n": jnp.int32(c.rank)}, right, left,
        sendtag=c.rank, recvtag=left, comm=c,
    )  # fmt: skip
    back = mg.sendrecv(x[2] * 2, left, right, sendtag=10, recvtag=10, comm=c)
    return jnp.concatenate([got["a"].astype(x.dtype) * (1 + got["n"]), back[None]])


def both_ways_simulated(X: Any) -> Any:
    ranks = jnp.arange(1.0, len(X) + 1).reshape(-1, 1, 1)
    down = jnp.roll(ranks * X[:, :2].astype("float32").astype(X.dtype), 1, axis=0)
    return jnp.concatenate([down, jnp.roll(2 * X[:, 2:], -1, axis=0)], axis=1)


def other_structure(x: Any, c: Communicator) -> Any:
    """Even ranks send one array and receive a tree of three dtypes; odd ranks the reverse."""
    partner = c.rank ^ 1
    if partner >= c.size:
        return x
    tree = (jnp.int32(7), x[:, 0], x[0].astype("float32"), x[1:].sum(0))
    if c.rank % 2 == 0:
        seven, a, b, d = mg.sendrecv(x, partner, partner, like=tree, comm=c)
        return x + a[:, None] * seven + b.astype(x.dtype) + d
    return mg.sendrecv(tree, partner, partner, like=x, comm=c)


def other_structure_simulated(X: Any) -> Any:
    rows = []
    for r in range(len(X)):
        x, y = X[r], X[r ^ 1] if r ^ 1 < len(X) else None
        if y is None:
            rows.append(x)
        elif r % 2:
            rows.append(y)
        else:
            b = y[0].astype("float32").astype(x.dtype)
            rows.append(x + 7 * y[:, :1] + b + y[1:].sum(0))
    return jnp.stack(rows)


def to_self(x: Any, c: Communicator) -> Any:
    """Two messages under way to oneself, received in the other order."""
    mg.send(x, c.rank, tag=1, comm=c)
    mg.send(x[:1], c.rank, tag=2, comm=c)
    row = mg.recv(x[:1], c.rank, tag=2, comm=c)
    return mg.recv(x, c.rank, tag=1, comm=c) * row


PROGRAMS = {
    "both ways": (both_ways, both_ways_simulated),
    "other structure": (other_structure, other_structure_simulated),
    "to self": (to_self, lambda X: X * X[:, :1]),
}


HOW = {"both ways": ("jit", "vmap", "checkpoint(scan)"), "to self": TRANSFORMS}


@pytest.mark.cases(
    *("both ways-vmap", "both ways-checkpoint(scan)", "to self-eager", "to self-scan(checkpoint)"),
    reason="one message of several dtypes, and two messages that overtake each other, in each way",
)
@pytest.mark.parametrize(("name", "how"), [(name, how) for name in HOW for how in HOW[name]])
def test_value_gradient_and_dot_product(name: str, how: str, comm: Communicator) -> None:
    f, F = PROGRAMS[name]
    if name == "both ways":  # float32 on the way: compare with its rounding
        x, X = operand(comm)
        transform, reference = TRANSFORMED[how]
        g, G = transform(lambda x: f(x, comm)), reference(F)
        loss, Loss = (lambda x: jnp.sum(g(x) ** 2)), (lambda X: jnp.sum(G(X) ** 2))
        got = mg.jit(mg.value_and_grad(loss))(x)
        value, gradient = jax.jit(jax.value_and_grad(Loss))(X)
        close(got, (value, gradient[comm.rank]), rtol=1e-5)
        mg.dot_test(g, x, rtol=1e-5)
    else:
        prove(lambda x: f(x, comm), F, comm, how)


@pytest.mark.ranks(2, 3, 4)
def test_each_side_its_own_structure(comm: Communicator) -> None:
    x, X = operand(comm)
    f = mg.jit(lambda x: other_structure(x, comm))
    close(f(x), other_structure_simulated(X)[comm.rank])
    gradient = mg.jit(mg.grad(lambda x: jnp.sum(f(x) ** 2)))(x)
    expected = jax.grad(lambda X: jnp.sum(other_structure_simulated(X) ** 2))(X)
    close(gradient, expected[comm.rank], rtol=1e-5)
    mg.dot_test(f, x, rtol=1e-5)


@pytest.mark.full("test_divergent has second derivatives of send and recv")
def test_second_order(comm: Communicator) -> None:
    f, F = PROGRAMS["to self"]
    prove_second_order(lambda x: f(x, comm), F, comm)


def test_a_large_message_to_self_may_be_received_later(comm: Communicator) -> None:
    x = jnp.arange(1e6) + comm.rank
    mg.send(x, comm.rank, comm=comm)
    mg.send(-x, comm.rank, comm=comm)
    close(mg.recv(x, comm.rank, comm=comm), x)
    close(mg.recv(x, comm.rank, comm=comm), -x)


@pytest.mark.ranks(2)
def test_one_message_for_each_dtype(comm: Communicator) -> None:
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "i": jnp.int32(3), "b": [jnp.ones(4), jnp.ones(())]}
    before = record().calls
    if comm.rank == 0:
        mg.send(tree, 1, comm=comm)
    else:
        like = jax.tree.map(jnp.zeros_like, tree)
        close(mg.recv(like, 0, tag=0, comm=comm), tree)
        assert jax.tree.structure(like) == jax.tree.structure(tree)
    assert record().calls - before == 2


def test_nobody(comm: Communicator) -> None:
    x = jnp.ones(3)
    mg.send(x, MPI.PROC_NULL, comm=comm)
    close(mg.recv(x, MPI.PROC_NULL, comm=comm), jnp.zeros(3))
    gradient = mg.grad(lambda x: jnp.sum(x + mg.recv(x, MPI.PROC_NULL, comm=comm)))(x)
    close(gradient, x)


def test_sendrecv_of_a_tree_from_anyone(comm: Communicator) -> None:
    """All dtypes come from one sender; far, to oneself and to nobody, too."""
    tree = lambda r: {"a": jnp.arange(3.0) + r, "n": jnp.int32(r), "b": [jnp.arange(6e4) * r]}
    for shift in range(comm.size):
        dest, source = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
        got = mg.sendrecv(tree(comm.rank), dest, MPI.ANY_SOURCE, shift, shift, comm=comm)
        close(got, tree(source))
    got = mg.sendrecv(tree(1), MPI.PROC_NULL, MPI.PROC_NULL, 0, MPI.ANY_TAG, comm=comm)
    close(got, jax.tree.map(jnp.zeros_like, tree(1)))


def test_wrong_arguments(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"irecv: source must be .* got 99"):
        mg.irecv(1.0, 99)
    with pytest.raises(ValueError, match="sendrecv: sendtag must be one tag, got the wildcard"):
        mg.sendrecv(1.0, comm.rank, comm.rank, MPI.ANY_TAG)
    with pytest.raises(ValueError, match="got -5"):
        mg.send(1.0, comm.rank, tag=-5)
    with pytest.raises(TypeError, match="Python integer"):
        mg.recv(1.0, np.float64(0))  # type: ignore[arg-type]
