"""Every operation on tensors has the values and derivatives of the same program in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpigrad
import mpigrad.torch as mt
from helpers import uneven
from mpigrad.communicator import Communicator

# The library (mpigrad or mpigrad.torch), x, the communicator -> an array, or a tree of arrays.
Program = Callable[[Any, Any, Communicator], Any]


def _ring(m: Any, x: Any, c: Communicator) -> Any:
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    return m.sendrecv(x, right, left, sendtag=c.rank, recvtag=left, comm=c)


def _chain(m: Any, x: Any, c: Communicator) -> Any:
    """Send to the next rank with a tag; rank 0 returns its own operand."""
    if c.rank + 1 < c.size:
        m.send(x, c.rank + 1, tag=5, comm=c)
    return m.recv(x, c.rank - 1, tag=5, comm=c) if c.rank > 0 else 1 * x


def _anyone(m: Any, x: Any, c: Communicator) -> Any:
    if c.rank > 0:
        m.send(x, 0, tag=c.rank, comm=c)
        return x * x
    total = 2 * x
    for _ in range(c.size - 1):
        value, source, tag = m.recv_with_status(x, comm=c)
        total = total + value * (source + tag)
    return total


def _requests(m: Any, x: Any, c: Communicator) -> Any:
    arriving = m.irecv(x, (c.rank - 1) % c.size, tag=2, comm=c)
    leaving = m.isend(3 * x, (c.rank + 1) % c.size, tag=2, comm=c)
    y = x * x
    got, nothing = m.waitall([arriving, leaving])
    assert nothing is None
    return y * got + m.wait(m.irecv(x, MPI.PROC_NULL, comm=c))


def _neighbors(m: Any, x: Any, c: Communicator) -> Any:
    others = [r for r in ((c.rank - 1) % c.size, (c.rank + 1) % c.size) if r != c.rank]
    others = list(dict.fromkeys(others))
    n = len(others)
    return m.neighbor_alltoallv(x[:n], others, [1] * n, [1] * n, comm=c)


def _alltoallv(m: Any, x: Any, c: Communicator) -> Any:
    counts = [(c.rank + s) % 2 for s in range(c.size)]
    return m.alltoallv(x[: sum(counts)], counts, counts, comm=c)


def _epoch(m: Any, x: Any, c: Communicator) -> Any:
    onto = (c.rank + 1) % c.size
    window, (got,) = m.one_sided(
        x[:2], put=[(x[2:4], onto, 0)], accumulate=[(x[:1], onto, 1)], get=[(0, 0, 2)], comm=c
    )
    return window * got


def _epoch_of_tree(m: Any, x: Any, c: Communicator) -> Any:
    onto, tree = (c.rank + 1) % c.size, {"a": x, "b": x[:, 0]}
    row = {"a": x[2:3], "b": x[2:3, 1]}
    window, (got,) = m.one_sided(tree, put=[(row, onto, 0)], get=[(onto, 1, 7)], comm=c)
    return window["b"][1:] * got["b"], window["a"]


PREFIX = {
    m.__name__: m.custom_operation(
        forward=lambda x, comm: comm.scan(x),
        transpose=lambda ct, comm: comm.allreduce(ct) - comm.scan(ct) + ct,
    )
    for m in (mpigrad, mt)
}


PREFIXES = {
    m.__name__: m.custom_operation(
        forward=lambda x, comm: (comm.scan(x[1]), x[0]),
        transpose=lambda ct, comm: [ct[1], comm.allreduce(ct[0]) - comm.scan(ct[0]) + ct[0]],
        shape=lambda x: (x[1], x[0]),
    )
    for m in (mpigrad, mt)
}


PROGRAMS: dict[str, Program] = {
    "bcast": lambda m, x, c: m.bcast(x, c.size - 1, comm=c),
    "reduce": lambda m, x, c: m.reduce(x, root=c.size - 1, comm=c),
    "allreduce": lambda m, x, c: m.allreduce(x, comm=c),
    "gather": lambda m, x, c: m.gather(x, c.size // 2, comm=c),
    "scatter": lambda m, x, c: m.scatter(x[: c.size], c.size // 2, comm=c),
    "allgather": lambda m, x, c: m.allgather(x, comm=c),
    "alltoall": lambda m, x, c: m.alltoall(x[: c.size], comm=c),
    "reduce_scatter": lambda m, x, c: m.reduce_scatter(x[: c.size], comm=c),
    "scan": lambda m, x, c: m.scan(x, comm=c),
    "exscan": lambda m, x, c: m.exscan(x, comm=c),
    "gatherv": lambda m, x, c: m.gatherv(x[: uneven(c.size)[c.rank]], uneven(c.size), comm=c),
    "scatterv": lambda m, x, c: m.scatterv(x[: 2 * c.size], [2] * c.size, comm=c),
    "allgatherv": lambda m, x, c: m.allgatherv(x[: uneven(c.size)[c.rank]], uneven(c.size), comm=c),
    "alltoallv": _alltoallv,
    "reduce_scatterv": lambda m, x, c: m.reduce_scatterv(x[: 2 * c.size], [2] * c.size, comm=c),
    "sendrecv": _ring,
    "send and recv": _chain,
    "a receive from anyone": _anyone,
    "sendrecv from anyone": lambda m, x, c: m.sendrecv(
        x, (c.rank + 1) % c.size, MPI.ANY_SOURCE, 3, MPI.ANY_TAG, comm=c
    ),
    "requests": _requests,
    "neighbor_alltoallv": _neighbors,
    "one_sided": _epoch,
    "one_sided of a tree": _epoch_of_tree,
    "custom_operation": lambda m, x, c: PREFIX[m.__name__](x, comm=c),
    "custom_operation of a tree": lambda m, x, c: PREFIXES[m.__name__]([x, x[0]], comm=c),
    "allreduce PROD": lambda m, x, c: m.allreduce(x, MPI.PROD, comm=c),
    "allreduce MAX": lambda m, x, c: m.allreduce(x, MPI.MAX, comm=c),
    "scan PROD": lambda m, x, c: m.scan(x, MPI.PROD, comm=c),
    "allreduce MAXLOC": lambda m, x, c: m.allreduce(x, MPI.MAXLOC, comm=c),
    "a tree": lambda m, x, c: m.allreduce({"a": x[0], "b": (x[1:], x[2] * x[2])}, comm=c),
}

ROWS = 8  # two for each of four ranks


def operand(comm: Communicator, dtype: Any = np.float64) -> np.ndarray:
    """Numbers of which some are equal on all ranks, and some are zero."""
    generator = np.random.default_rng([3, comm.rank])
    x = generator.standard_normal((ROWS, 2))
    x[0], x[1] = 1.5, 0
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * generator.standard_normal(x.shape)
    return x.astype(dtype)


def leaves(tree: Any) -> list[Any]:
    """Results with a derivative."""
    kinds = (torch.is_tensor, lambda y: jnp.issubdtype(y.dtype, jnp.inexact))
    found = jax.tree.leaves(tree)
    return [y for y in found if (y.is_floating_point() if kinds[0](y) else kinds[1](y))]


def weights(ys: list[Any], comm: Communicator) -> list[np.ndarray]:
    generator = np.random.default_rng([4, comm.rank])
    return [generator.standard_normal(tuple(y.shape)) for y in ys]


# Of two ranks, the next is also the one before.
RINGS = {"sendrecv", "sendrecv from anyone", "requests", "one_sided", "one_sided of a tree"}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.thin(3)) if n in RINGS else n for n in PROGRAMS]
)
def test_results_and_adjoints_are_those_of_jax(name: str, comm: Communicator) -> None:
    program, x = PROGRAMS[name], operand(comm)
    shapes = jax.eval_shape(lambda x: program(mpigrad, x, comm), x)
    cts = weights(leaves(shapes), comm)

    @mpigrad.jit
    def in_jax(x: Any, cts: Any) -> Any:
        ys, back = mpigrad.vjp(lambda x: leaves(program(mpigrad, x, comm)), x)
        return ys, back(cts)[0]

    values, cotangent = in_jax(x, cts)
    leaf = torch.from_numpy(x).requires_grad_()
    ys = leaves(program(mt, leaf, comm))
    for y, value in zip(ys, values, strict=True):
        np.testing.assert_allclose(y.detach().numpy(), value, rtol=1e-14, atol=1e-14)
    torch.autograd.backward(ys, [torch.from_numpy(ct) for ct in cts])
    np.testing.assert_allclose(leaf.grad.numpy(), cotangent, rtol=1e-14, atol=1e-14)
    mt.dot_test(lambda x: program(mt, x, comm), torch.from_numpy(x))


def test_requests_of_one_tag_are_waited_for_in_the_order_of_their_posts(
    comm: Communicator,
) -> None:
    """The order of requests in `waitall` and of compilations does not matter."""
    me = comm.rank
    for turn in (1, -1, 1):
        x = torch.arange(3.0, dtype=torch.float64).requires_grad_()
        arriving = [mt.irecv(x, me, comm=comm) for _ in range(2)]
        leaving = [mt.isend(y, me, comm=comm) for y in (x * x, torch.sin(x))]
        got = mt.waitall([*arriving, *leaving][::turn])[::turn]
        (2 * got[0] + 3 * got[1]).sum().backward()
        expected = 4 * x + 3 * torch.cos(x)
        torch.testing.assert_close(x.grad, expected.detach())


def test_irecv_rejects_wildcards(comm: Communicator) -> None:
    x = torch.ones(3)
    for source, tag in ((MPI.ANY_SOURCE, 0), (comm.rank, MPI.ANY_TAG)):
        with pytest.raises(NotImplementedError, match="wildcards are not supported"):
            mt.irecv(x, source, tag, comm=comm)
