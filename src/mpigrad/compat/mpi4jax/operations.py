"""The functions of mpi4jax, with its signatures and return values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from mpi4py import MPI

from mpigrad import operations as mpigrad
from mpigrad.compat.mpi4jax.adjoints import sum_over_ranks
from mpigrad.compat.mpi4jax.communicators import communicator
from mpigrad.compat.mpi4jax.status import set_status
from mpigrad.compat.mpi4jax.tokens import NO_TOKEN, with_token
from mpigrad.operations.carrier import tie_in
from mpigrad.operations.pytree_packing import arrays

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bcast",
    "gather",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]

F = TypeVar("F", bound=Callable[..., Any])
_INTEGERS = frozenset(("source", "dest", "sendtag", "recvtag", "tag", "root"))
_OBJECTS = {
    "op": (MPI.Op,),
    "comm": (MPI.Intracomm, type(None)),
    "status": (MPI.Status, type(None)),
}


def _checked(function: F) -> F:
    """Check the types of arguments that mpi4jax checks, and raise a TypeError."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in _INTEGERS:
                valid, expected = isinstance(value, (int, np.integer)), "a Python integer"
            elif name in _OBJECTS:
                types = _OBJECTS[name]
                valid, expected = isinstance(value, types), f"mpi4py.MPI.{types[0].__name__}"
            else:
                continue
            if not valid:
                remedy = (
                    "The argument is traced: make it static, for example by jax.jit's "
                    "static_argnums."
                    if isinstance(value, Tracer)
                    else "Convert it."
                )
                raise TypeError(
                    f"mpi4jax.{function.__name__}: {name} must be {expected}, got "
                    f"{type(value).__name__} on rank {MPI.COMM_WORLD.rank}. {remedy}"
                )
        return function(*args, **kwargs)

    return cast(F, call)


def _array(function: str, x: Any, argument: str = "x") -> Any:
    return jnp.asarray(arrays(f"mpi4jax.{function}", x, argument))


def _check_rows(function: str, x: Any, size: int) -> None:
    if x.ndim == 0 or x.shape[0] != size:
        raise ValueError(
            f"mpi4jax.{function}: x must have shape ({size}, ...), one row for each rank of the "
            f"communicator, got {x.shape} on rank {MPI.COMM_WORLD.rank}. Reshape it."
        )


@_checked
def allgather(x: Any, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Stack the arrays of all ranks: (number of ranks, *x.shape)."""
    return with_token(token, mpigrad.allgather(_array("allgather", x), communicator(comm)))


@_checked
def allreduce(
    x: Any, op: MPI.Op, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN
) -> Any:
    """Reduce the arrays of all ranks."""
    x, group = _array("allreduce", x), communicator(comm)
    if op == MPI.SUM:
        return with_token(token, sum_over_ranks(x, group))
    return with_token(token, mpigrad.allreduce(x, op, group))


@_checked
def alltoall(x: Any, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Send row s of `x` to rank s, and receive a row from every rank."""
    x, group = _array("alltoall", x), communicator(comm)
    _check_rows("alltoall", x, group.size)
    return with_token(token, mpigrad.alltoall(x, group))


@_checked
def barrier(*, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Wait until every rank has called `barrier`."""
    mpigrad.barrier(communicator(comm))
    return with_token(token)


@_checked
def bcast(x: Any, root: int, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Send the root's `x` to every rank."""
    return with_token(token, mpigrad.bcast(_array("bcast", x), root, communicator(comm)))


@_checked
def gather(x: Any, root: int, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Stack the arrays of all ranks on the root; other ranks get their `x` back."""
    x, group = _array("gather", x), communicator(comm)
    rows = mpigrad.gather(x, root, group)
    return with_token(token, rows if group.rank == root else x)


@_checked
def recv(
    x: Any,
    source: int = MPI.ANY_SOURCE,
    *,
    tag: int = MPI.ANY_TAG,
    comm: MPI.Intracomm | None = None,
    status: MPI.Status | None = None,
    token: Any = NO_TOKEN,
) -> Any:
    """Receive an array of the shape and dtype of `x`, whose values are not used."""
    value, sender, sent_tag = mpigrad.recv_with_status(
        _array("recv", x), source, tag, communicator(comm)
    )
    return with_token(token, set_status(status, value, sender, sent_tag))


@_checked
def reduce(
    x: Any, op: MPI.Op, root: int, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN
) -> Any:
    """Reduce the arrays of all ranks onto the root; other ranks get their `x` back."""
    x, group = _array("reduce", x), communicator(comm)
    total = mpigrad.reduce(x, op, root, group)
    return with_token(token, total if group.rank == root else x)


@_checked
def scan(x: Any, op: MPI.Op, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Reduce the arrays of the ranks from 0 to this rank."""
    return with_token(token, mpigrad.scan(_array("scan", x), op, communicator(comm)))


@_checked
def scatter(x: Any, root: int, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Send row r of the root's `x` to rank r.

    On other ranks `x` has the shape and dtype of the result, and its values are not used.
    """
    x, group = _array("scatter", x), communicator(comm)
    if group.rank == root:
        _check_rows("scatter", x, group.size)
    else:
        x = jnp.broadcast_to(x, (group.size, *x.shape))
    return with_token(token, mpigrad.scatter(x, root, group))


@_checked
def send(
    x: Any,
    dest: int,
    *,
    tag: int = 0,
    comm: MPI.Intracomm | None = None,
    token: Any = NO_TOKEN,
) -> Any:
    """Send `x` to the rank `dest`, which must receive it."""
    mpigrad.send(_array("send", x), dest, tag, communicator(comm))
    return with_token(token)


@_checked
def sendrecv(
    sendbuf: Any,
    recvbuf: Any,
    source: int,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: int = MPI.ANY_TAG,
    comm: MPI.Intracomm | None = None,
    status: MPI.Status | None = None,
    token: Any = NO_TOKEN,
) -> Any:
    """Send `sendbuf` to `dest`, and receive from `source` an array like `recvbuf`."""
    group = communicator(comm)
    x = _array("sendrecv", sendbuf, "sendbuf")
    # As in mpi4jax, the result is differentiated if sendbuf is.
    like = tie_in(jax.lax.stop_gradient(_array("sendrecv", recvbuf, "recvbuf")), x)
    if status is None and MPI.ANY_SOURCE != source and MPI.ANY_TAG != recvtag:
        received = mpigrad.sendrecv(x, dest, source, sendtag, recvtag, like, group)
        return with_token(token, received)
    request = mpigrad.isend(x, dest, sendtag, group)
    received, sender, sent_tag = mpigrad.recv_with_status(like, source, recvtag, group)
    mpigrad.wait(request)
    return with_token(token, set_status(status, received, sender, sent_tag))
