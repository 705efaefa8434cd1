"""What other differentiable message-passing libraries get wrong, or refuse: it is right here.

The adjoint of allreduce in both conventions (the identity is wrong for nested and weighted sums)
is in test_operations.py; wildcards, requests and products with zeros have tests of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import mpigrad as mg
from helpers import close
from mpigrad.communicator import Communicator

X = jnp.array([0.5, -1.0, 2.0])


def points(size: int) -> Any:
    return X + 0.25 * jnp.arange(size)[:, None]


@pytest.mark.ranks(2)
@pytest.mark.cases("A", "C", reason="test_transforms has nested sums and replicated arguments")
@pytest.mark.parametrize("case", ["A", "B", "C", "D"])
def test_the_adjoint_of_allreduce(case: str, comm: Communicator) -> None:
    """Four losses on 2 ranks, x = (1, 2): summed over ranks, and counted once where that is one."""
    r = comm.rank
    x = jnp.float64(r + 1 if case != "D" else 1)
    loss, summed, once = {
        "A": (lambda x: mg.allreduce(x) ** 2, 12, 6),
        "B": (lambda x: mg.allreduce(mg.allreduce(x) / 2), 2, 1),
        "C": (lambda x: (r + 1) * mg.allreduce(x), 3, None),
        "D": (lambda w: mg.allreduce(w * (r + 1)), 2 * (r + 1), r + 1),
    }[case]
    assert float(mg.grad(loss)(x)) == summed
    for wrap in (mg.jit, jax.checkpoint):
        assert float(mg.jit(mg.grad(wrap(loss)))(x)) == summed
        if once is not None:
            assert float(mg.jit(mg.grad(wrap(loss), loss="replicated"))(x)) == once
    if once is None:  # not one loss: refused, on every rank
        with pytest.raises(Exception, match="not the same on all ranks"):
            mg.grad(loss, loss="replicated")(x)


@pytest.mark.full("test_operations has the derivatives of each operation")
def test_every_operation_has_a_gradient(comm: Communicator) -> None:
    """mpi4jax 0.9.1: not differentiable but allreduce(SUM) and, in part, sendrecv."""
    last, rank = comm.size - 1, comm.rank
    names = ("allgather", "alltoall", "reduce_scatter", "scan", "exscan")
    calls: dict[str, Callable[[Any], Any]] = {
        "bcast": lambda x: mg.bcast(x, last),
        "reduce": lambda x: mg.reduce(x, root=last),
        "gather": lambda x: mg.gather(x, last),
        "scatter": lambda x: mg.scatter(jnp.stack([x * k for k in range(1, comm.size + 1)]), last),
        "recv": lambda x: mg.recv(x, rank - 1) if rank else x,
    }
    rows = ("alltoall", "reduce_scatter")
    for name in names:
        call = getattr(mg, name, None)
        if call is not None:
            calls[name] = lambda x, f=call, n=name: f(
                jnp.stack([x] * comm.size) if n in rows else x
            )

    def all_of_them(x: Any) -> Any:
        if rank < last:
            mg.send(jnp.sin(x), rank + 1)
        received = {"recv": calls["recv"](x)}
        return received | {n: jnp.cos(f(x)) for n, f in calls.items() if n != "recv"}

    x = points(comm.size)[rank]
    mg.dot_test(all_of_them, x)
    gradient = mg.jit(mg.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(all_of_them(x))))))(x)
    assert np.all(np.isfinite(gradient))
    assert float(jnp.max(jnp.abs(gradient))) > 0


@pytest.mark.ranks(2, 3)
@pytest.mark.cases(
    *("constant buffer", "unused on one rank", "checkpoint"),
    reason="test_operations has the jvp",
)
@pytest.mark.parametrize("how", ["jvp", "constant buffer", "unused on one rank", "checkpoint"])
def test_sendrecv(how: str, comm: Communicator) -> None:
    """mpi4jax: no jvp, a TypeError, a TypeError, an error."""
    size, rank = comm.size, comm.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    like = jnp.zeros(3) if how == "constant buffer" else None
    used = [float(how != "unused on one rank" or r > 0) for r in range(size)]

    def f(x: Any) -> Any:
        y = mg.sendrecv(jnp.sin(x), right, left, rank, left, like=like)
        return jnp.sum(x**3) + (jnp.sum(y**2) if used[rank] else 0)

    def joint(X: Any) -> Any:
        arrived = jnp.roll(jnp.sin(X), 1, axis=0)
        return jnp.sum(X**3) + jnp.sum(arrived**2 * jnp.array(used)[:, None])

    X = points(size)
    f = jax.checkpoint(f) if how == "checkpoint" else f
    close(mg.jit(mg.grad(f))(X[rank]), jax.grad(joint)(X)[rank])
    if how == "jvp":
        tangent = mg.jvp(f, (X[rank],), (X[rank],))[1]
        close(comm.mpi.allreduce(float(tangent)), jax.jvp(joint, (X,), (X,))[1])


@pytest.mark.ranks(3)
def test_a_ring_of_three_with_tags_does_not_hang(comm: Communicator) -> None:
    """mpi4jax: a deadlock in the gradient, whose tags are not exchanged."""
    right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3

    def f(x: Any) -> Any:
        for _ in range(3):  # once around: everybody's own number comes back
            x = mg.sendrecv(x, right, left, sendtag=10 + comm.rank, recvtag=10 + left)
        return jnp.sum(x**2)

    x = points(3)[comm.rank]
    close(mg.grad(f)(x), 2 * x)


def test_vmap_with_one_batched_operand(comm: Communicator) -> None:
    """mpi4jax: an error when only one of operand and receive buffer is batched."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    exchange = lambda x, like: mg.sendrecv(x, right, left, like=like)
    batch = points(comm.size)[comm.rank] * jnp.array([[1.0], [2.0]])
    expected = points(comm.size)[left] * jnp.array([[1.0], [2.0]])
    close(mg.vmap(exchange, (0, None))(batch, jnp.zeros(3)), expected)
    close(mg.vmap(exchange, (0, 0))(batch, jnp.zeros((2, 3))), expected)
    # Batched on one rank only: its receiver gets a batch of the same.
    mine = mg.vmap(lambda _: exchange(batch[0], None), axis_size=2)(jnp.zeros(2))
    close(mine, jnp.stack([expected[0], expected[0]]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_floats_move(dtype: str, comm: Communicator) -> None:
    """mpi4jax: refused. Gradients of moved data move, too."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    f = lambda x: jnp.sum(mg.sendrecv(x, right, left).astype("float32") ** 2)
    x = points(comm.size)[comm.rank].astype(dtype)
    gradient = mg.grad(f)(x)
    assert gradient.dtype == x.dtype
    close(gradient.astype("float32"), 2 * x.astype("float32"))


@pytest.mark.parametrize("op", ["PROD", "MAX"])
def test_reductions_other_than_sums(op: str, comm: Communicator) -> None:
    """torch.distributed.nn: silently wrong gradients of all_reduce(PROD) and all_reduce(MAX)."""
    X = points(comm.size)
    reduced = {"PROD": lambda X: jnp.prod(X, 0), "MAX": lambda X: jnp.max(X, 0)}[op]
    got = mg.grad(lambda x: jnp.sum(mg.allreduce(x, op=getattr(MPI, op)) ** 2))(X[comm.rank])
    close(got, comm.size * jax.grad(lambda X: jnp.sum(reduced(X) ** 2))(X)[comm.rank])


def test_second_derivatives_through_messages(comm: Communicator) -> None:
    """mpi4torch: silently zero through isend and irecv."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def exchange(x: Any) -> Any:
        if comm.size == 1:
            return x
        request = mg.isend(x, right, tag=4)
        y = mg.wait(mg.irecv(x, left, tag=4))
        mg.wait(request)
        return y

    f = lambda x: jnp.sum(exchange(jnp.sin(x)) ** 3 * x)
    joint = lambda X: jnp.sum(jnp.roll(jnp.sin(X), 1, axis=0) ** 3 * X)
    X = points(comm.size)
    product = mg.jit(lambda x: mg.jvp(mg.grad(f), (x,), (x,))[1])(X[comm.rank])
    close(product, jax.jvp(jax.grad(joint), (X,), (X,))[1][comm.rank])


@pytest.mark.ranks(2)
def test_a_send_without_a_result_keeps_its_gradient(comm: Communicator) -> None:
    """mpi4torch: the gradient is dropped where the program does not join the send to its result."""

    def f(x: Any) -> Any:
        if comm.rank == 0:
            mg.send(jnp.sin(x), 1)
            return 0.0 * jnp.sum(x)
        return jnp.sum(mg.recv(jnp.zeros(3), 0) ** 2)

    x = points(2)[comm.rank]
    close(mg.grad(f)(x), jnp.sin(2 * x) if comm.rank == 0 else jnp.zeros(3))
