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
from mpigrad.compat.mpi4jax.communicators import (
    NO_TOKEN,
    communicator,
    set_status,
    sum_over_ranks,
    with_token,
)
from mpigrad.extend import allow_messages_in_rules, arrays, tie_in

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
        with allow_messages_in_rules():  # as mpi4jax does
            return function(*args, **kwargs)

    return cast(F, call)


def _array(function: str, x: Any, argument: str = "x") -> Any:
    value = arrays(f"mpi4jax.{function}", x, argument)
    if isinstance(value, jax.Array):
        return value
    raise TypeError(
        f"mpi4jax.{function}: {argument} must be an array, got {type(x).__name__} on rank "
        f"{MPI.COMM_WORLD.rank}. Call mpigrad.{function}, which takes pytrees of arrays."
    )


def _check_rows(function: str, x: Any, size: int) -> None:
    if x.ndim == 0 or x.shape[0] != size:
        raise ValueError(
            f"mpi4jax.{function}: {function.capitalize()} input must have shape (nproc, ...), with "
            f"nproc = {size} ranks, got {x.shape} on rank {MPI.COMM_WORLD.rank}. Reshape it."
        )


@_checked
def allgather(x: Any, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Stack the arrays of all ranks along a new leading axis, on every rank.

    Parameters
    ----------
    x
        Array or number, with the same shape and dtype on every rank.
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is (result, token).

    Returns
    -------
    Array of shape (number of ranks, *x.shape).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpi4py import MPI
    >>> from mpigrad.compat import mpi4jax
    >>> size = MPI.COMM_WORLD.size
    >>> mpi4jax.allgather(jnp.ones(2)).shape == (size, 2)
    True
    """
    return with_token(token, mpigrad.allgather(_array("allgather", x), communicator(comm)))


@_checked
def allreduce(
    x: Any, op: MPI.Op, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN
) -> Any:
    """Reduce the arrays of all ranks, on every rank.

    Parameters
    ----------
    x
        Array or number, with the same shape and dtype on every rank.
    op
        The reduction, for example MPI.SUM: the reductions of `mpigrad.allreduce`.
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is (result, token).

    Returns
    -------
    Array of the shape and dtype of `x`. For MPI.SUM the adjoint is the identity, as in mpi4jax, or
    the exact one with MPIGRAD_MPI4JAX_ADJOINTS=exact. Other reductions have exact adjoints.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from mpigrad.compat import mpi4jax
    >>> size = MPI.COMM_WORLD.size
    >>> float(mpi4jax.allreduce(1.0, op=MPI.SUM)) == size
    True
    """
    x, group = _array("allreduce", x), communicator(comm)
    if op == MPI.SUM:
        return with_token(token, sum_over_ranks(x, group))
    return with_token(token, mpigrad.allreduce(x, op, group))


@_checked
def alltoall(x: Any, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Send row s of `x` to rank s, and receive a row from every rank.

    Parameters
    ----------
    x
        Array of shape (number of ranks, ...), the same on every rank.
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is (result, token).

    Returns
    -------
    Array of the shape of `x`. Row s was sent by rank s.

    Raises
    ------
    ValueError
        If `x` does not have a row for each rank.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpi4py import MPI
    >>> from mpigrad.compat import mpi4jax
    >>> size = MPI.COMM_WORLD.size
    >>> mpi4jax.alltoall(jnp.ones((size, 2))).shape == (size, 2)
    True
    """
    x, group = _array("alltoall", x), communicator(comm)
    _check_rows("alltoall", x, group.size)
    return with_token(token, mpigrad.alltoall(x, group))


@_checked
def barrier(*, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Wait until every rank of the communicator has called `barrier`.

    Parameters
    ----------
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is the token.

    Examples
    --------
    >>> from mpigrad.compat import mpi4jax
    >>> mpi4jax.barrier()
    """
    mpigrad.barrier(communicator(comm))
    return with_token(token)


@_checked
def bcast(x: Any, root: int, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Send the root's `x` to every rank.

    Parameters
    ----------
    x
        Array or number, with the same shape and dtype on every rank.
    root
        The rank that sends: a Python integer.
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is (result, token).

    Returns
    -------
    The root's values.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.compat import mpi4jax
    >>> mpi4jax.bcast(jnp.arange(3.0), root=0)
    Array([0., 1., 2.], dtype=float32)
    """
    return with_token(token, mpigrad.bcast(_array("bcast", x), root, communicator(comm)))


@_checked
def gather(x: Any, root: int, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Stack the arrays of all ranks on the root.

    Parameters
    ----------
    x
        Array or number, with the same shape and dtype on every rank.
    root
        The rank that receives: a Python integer.
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is (result, token).

    Returns
    -------
    Array of shape (number of ranks, *x.shape) on the root, and `x` on other ranks.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpigrad.compat import mpi4jax
    >>> mpi4jax.gather(jnp.arange(3.0), root=0)
    Array([[0., 1., 2.]], dtype=float32)
    """
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
    """Receive an array from another rank.

    Parameters
    ----------
    x
        Array of the shape and dtype of the message. Its values are not used.
    source
        The sender: a Python integer, or MPI.ANY_SOURCE.
    tag
        The tag of the send, or MPI.ANY_TAG.
    status
        A status of mpi4py, which gets the sender, the tag and the size of the message when the
        program runs.
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is (result, token).

    Returns
    -------
    The received array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpi4py import MPI
    >>> from mpigrad.compat import mpi4jax
    >>> mpi4jax.send(jnp.ones(2), dest=MPI.COMM_WORLD.rank)
    >>> mpi4jax.recv(jnp.zeros(2), source=MPI.COMM_WORLD.rank)
    Array([1., 1.], dtype=float32)
    """
    x, group = _array("recv", x), communicator(comm)
    if status is None:
        return with_token(token, mpigrad.recv(x, source, tag, group))
    value, sender, sent_tag = mpigrad.recv_with_status(x, source, tag, group)
    return with_token(token, set_status(status, value, sender, sent_tag))


@_checked
def reduce(
    x: Any, op: MPI.Op, root: int, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN
) -> Any:
    """Reduce the arrays of all ranks onto the root.

    Parameters
    ----------
    x
        Array or number, with the same shape and dtype on every rank.
    op
        The reduction, for example MPI.SUM: the reductions of `mpigrad.allreduce`.
    root
        The rank that receives: a Python integer.
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is (result, token).

    Returns
    -------
    The reduction on the root, and `x` on other ranks.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpi4py import MPI
    >>> from mpigrad.compat import mpi4jax
    >>> mpi4jax.reduce(jnp.arange(3.0), op=MPI.MAX, root=0)
    Array([0., 1., 2.], dtype=float32)
    """
    x, group = _array("reduce", x), communicator(comm)
    total = mpigrad.reduce(x, op, root, group)
    return with_token(token, total if group.rank == root else x)


@_checked
def scan(x: Any, op: MPI.Op, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Reduce the arrays of the ranks from 0 to this rank.

    Parameters
    ----------
    x
        Array or number, with the same shape and dtype on every rank.
    op
        The reduction, for example MPI.SUM: the reductions of `mpigrad.allreduce`.
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is (result, token).

    Returns
    -------
    Array of the shape and dtype of `x`.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from mpigrad.compat import mpi4jax
    >>> float(mpi4jax.scan(1.0, op=MPI.SUM)) == MPI.COMM_WORLD.rank + 1
    True
    """
    return with_token(token, mpigrad.scan(_array("scan", x), op, communicator(comm)))


@_checked
def scatter(x: Any, root: int, *, comm: MPI.Intracomm | None = None, token: Any = NO_TOKEN) -> Any:
    """Send row r of the root's `x` to rank r.

    Parameters
    ----------
    x
        On the root, array of shape (number of ranks, ...). On other ranks, array of the shape and
        dtype of the result, whose values are not used.
    root
        The rank that sends: a Python integer.
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is (result, token).

    Returns
    -------
    This rank's row.

    Raises
    ------
    ValueError
        If the `x` of the root does not have a row for each rank.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpi4py import MPI
    >>> from mpigrad.compat import mpi4jax
    >>> size = MPI.COMM_WORLD.size
    >>> mpi4jax.scatter(jnp.ones((size, 2)), root=0)
    Array([1., 1.], dtype=float32)
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
    """Send an array to another rank, which must receive it.

    Parameters
    ----------
    x
        Array or number.
    dest
        The receiver: a Python integer.
    tag
        The tag, an integer, which the receive matches.
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is the token.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpi4py import MPI
    >>> from mpigrad.compat import mpi4jax
    >>> mpi4jax.send(jnp.ones(2), dest=MPI.COMM_WORLD.rank, tag=5)
    >>> mpi4jax.recv(jnp.zeros(2), tag=5)
    Array([1., 1.], dtype=float32)
    """
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
    """Send an array and receive one at the same time, without deadlock.

    Parameters
    ----------
    sendbuf
        The array to send.
    recvbuf
        Array of the shape and dtype of the result. Its values are not used.
    source
        The sender of the result: a Python integer, or MPI.ANY_SOURCE.
    dest
        The receiver of `sendbuf`: a Python integer.
    sendtag
        The tag of the message to `dest`.
    recvtag
        The tag of the message from `source`, or MPI.ANY_TAG.
    status
        A status of mpi4py, which gets the sender, the tag and the size of the message when the
        program runs.
    comm
        An intra-communicator of mpi4py. Default: all ranks.
    token
        A token of mpi4jax before version 0.8. With it the result is (result, token).

    Returns
    -------
    The received array. The adjoint sends back to the rank that has sent.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpi4py import MPI
    >>> from mpigrad.compat import mpi4jax
    >>> size = MPI.COMM_WORLD.size
    >>> right, left = (MPI.COMM_WORLD.rank + 1) % size, (MPI.COMM_WORLD.rank - 1) % size
    >>> mpi4jax.sendrecv(jnp.ones(2), jnp.zeros(2), source=left, dest=right)
    Array([1., 1.], dtype=float32)
    """
    group = communicator(comm)
    x = _array("sendrecv", sendbuf, "sendbuf")
    # As in mpi4jax, the result is differentiated if sendbuf is.
    like = tie_in(jax.lax.stop_gradient(_array("sendrecv", recvbuf, "recvbuf")), x)
    if status is None and source != MPI.ANY_SOURCE and recvtag != MPI.ANY_TAG:
        received = mpigrad.sendrecv(x, dest, source, sendtag, recvtag, like, group)
        return with_token(token, received)
    request = mpigrad.isend(x, dest, sendtag, group)
    received, sender, sent_tag = mpigrad.recv_with_status(like, source, recvtag, group)
    mpigrad.wait(request)
    return with_token(token, set_status(status, received, sender, sent_tag))
