"""Every operation, beside the same map without messages on the stacked arrays of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad as mg
from mpigrad.communicator import Communicator


@dataclass(frozen=True)
class Case:
    """`run` on one rank, and `simulate` on the stack of all ranks' operands."""

    run: Callable[[Any, Communicator], Any]
    simulate: Callable[[Any], Any]
    shape: Callable[[int], tuple[int, ...]] = lambda size: (3, 2)
    additive: bool = False  # needs arithmetic of MPI


def _on(row: int, value: Any, size: int) -> Any:
    """`value` on one rank, zeros on the others."""
    return jnp.zeros((size, *value.shape), value.dtype).at[row].set(value)


def _ring(x: Any, comm: Communicator) -> Any:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    # The tag names the sender, so that sent and received tags differ.
    return mg.sendrecv(x, right, left, sendtag=comm.rank, recvtag=left, comm=comm)


def _chain(x: Any, comm: Communicator) -> Any:
    if comm.rank + 1 < comm.size:
        mg.send(x, comm.rank + 1, tag=5, comm=comm)
    if comm.rank > 0:
        return mg.recv(x, comm.rank - 1, tag=5, comm=comm)
    return jnp.zeros_like(x)


def _open_ends(x: Any, comm: Communicator) -> Any:
    right = comm.rank + 1 if comm.rank + 1 < comm.size else MPI.PROC_NULL
    left = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    return mg.sendrecv(x, right, left, comm=comm)


def _neighbors(x: Any, comm: Communicator) -> Any:
    """Row 0 goes to the left and rows 1, 2 to the right neighbour on a line of ranks."""
    left = [comm.rank - 1] if comm.rank > 0 else []
    right = [comm.rank + 1] if comm.rank + 1 < comm.size else []
    packed = jnp.concatenate([x[:1]] * len(left) + [x[1:3]] * len(right) + [x[:0]])
    got = mg.neighbor_alltoallv(
        packed, left + right, [1] * len(left) + [2] * len(right),
        [2] * len(left) + [1] * len(right), comm=comm,
    )  # fmt: skip
    got = got if left else jnp.concatenate([jnp.zeros_like(x[:2]), got])
    return got if right else jnp.concatenate([got, jnp.zeros_like(x[:1])])


def _neighbors_simulated(X: Any) -> Any:
    from_left = jnp.concatenate([jnp.zeros_like(X[:1, :2]), X[:-1, 1:3]])
    from_right = jnp.concatenate([X[1:, :1], jnp.zeros_like(X[:1, :1])])
    return jnp.concatenate([from_left, from_right], axis=1)


def _shifted(X: Any) -> Any:
    return jnp.concatenate([jnp.zeros_like(X[:1]), X[:-1]])


def _sum_everywhere(X: Any) -> Any:
    return jnp.broadcast_to(X.sum(0), X.shape)


CASES: dict[str, Case] = {
    "bcast": Case(
        lambda x, c: mg.bcast(x, c.size - 1, comm=c),
        lambda X: jnp.broadcast_to(X[-1], X.shape),
    ),
    "reduce": Case(
        lambda x, c: mg.reduce(x, root=c.size - 1, comm=c),
        lambda X: _on(-1, X.sum(0), len(X)),
        additive=True,
    ),
    "allreduce": Case(lambda x, c: mg.allreduce(x, comm=c), _sum_everywhere, additive=True),
    "gather": Case(
        lambda x, c: mg.gather(x, c.size // 2, comm=c), lambda X: _on(len(X) // 2, X, len(X))
    ),
    "scatter": Case(
        lambda x, c: mg.scatter(x, c.size // 2, comm=c),
        lambda X: X[len(X) // 2],
        lambda size: (size, 2),
    ),
    "sendrecv ring with tags": Case(_ring, lambda X: jnp.roll(X, 1, axis=0)),
    "sendrecv to nobody": Case(_open_ends, _shifted),
    "send and recv": Case(_chain, _shifted),
    "neighbor_alltoallv": Case(_neighbors, _neighbors_simulated),
}


def operand(case: Case, comm: Communicator, dtype: Any = np.float64) -> tuple[Any, Any]:
    """(this rank's operand, the stack of all ranks' operands), the same for every rank count."""
    shape = case.shape(comm.size)
    generator = np.random.default_rng(7)
    stack = generator.standard_normal((comm.size, *shape))
    if np.issubdtype(dtype, np.complexfloating):
        stack = stack + 1j * generator.standard_normal(stack.shape)
    elif not jnp.issubdtype(dtype, np.inexact):
        stack = np.rint(3 * np.abs(stack))
    stack = jnp.asarray(stack).astype(dtype)
    return stack[comm.rank], stack


def trace_only(rank: int, size: int) -> Communicator:
    """A communicator for tracing: programs are traced with it, never run."""
    comm = object.__new__(Communicator)
    comm.rank, comm.size, comm.slot = rank, size, 0
    return comm


def close(got: Any, expected: Any, rtol: float = 1e-11) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=rtol)
