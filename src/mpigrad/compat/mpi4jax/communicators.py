"""Arguments and results of mpi4jax: communicators, tokens, statuses, and its adjoint."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import io_callback
from mpi4py import MPI

from mpigrad.communicator import Communicator, world
from mpigrad.extend import (
    NO_ROOT,
    SUM,
    Activity,
    Primitive,
    bind_packed,
    check_op,
    linear_map,
    opaque_zero,
    primitive,
    tie_in,
)
from mpigrad.operations import allreduce

__all__ = [
    "ADJOINTS",
    "NEWEST",
    "NO_TOKEN",
    "VERSION",
    "communicator",
    "returns_token",
    "set_status",
    "sum_over_ranks",
    "version",
    "with_token",
]

# ---- The communicators of mpi4py that mpi4jax takes, as communicators of mpigrad ----


@functools.cache
def _keyval() -> int:
    """Return the attribute of an MPI communicator that keeps its Communicator."""
    return MPI.Comm.Create_keyval()


def communicator(comm: MPI.Intracomm | None = None) -> Communicator:
    """Return the Communicator of mpigrad that stands for a communicator of mpi4py.

    It is made at the first call, which is collective: all ranks of `comm` have to make it. Later
    calls return the same object until `comm` is freed.

    Parameters
    ----------
    comm
        An intra-communicator of mpi4py. Default: all ranks.

    Raises
    ------
    TypeError, ValueError
        If `comm` is not an intra-communicator, or this rank is not a member of it.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> from mpigrad.compat.mpi4jax import communicator
    >>> part = MPI.COMM_WORLD.Split(0)
    >>> communicator(part) is communicator(part)
    True
    """
    if comm is None or comm == MPI.COMM_WORLD:
        return world()
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        return Communicator(comm)  # raises the error
    kept = comm.Get_attr(_keyval())
    if isinstance(kept, Communicator):
        return kept
    made = Communicator(comm)
    comm.Set_attr(_keyval(), made)
    return made


# ---- The two conventions of mpi4jax: with tokens before version 0.8, and without ----


VERSION = "MPIGRAD_MPI4JAX_VERSION"
NEWEST = "0.9.1.post2"
NO_TOKEN: Any = object()  # None is a token of the older versions


def version() -> str:
    """Return the version of mpi4jax that the program was written for."""
    return os.environ.get(VERSION) or NEWEST


def _always_returns_token() -> bool:
    numbers = version().split(".")[:2]
    try:
        return tuple(map(int, numbers)) < (0, 8)
    except ValueError:
        raise ValueError(
            f"mpi4jax: {VERSION} must be a version such as 0.7.2, got {version()!r}. Correct the "
            "environment variable, or remove it."
        ) from None


def returns_token(token: Any) -> bool:
    """Return True if a call with this `token` returns one: it was passed, or the version is old."""
    return token is not NO_TOKEN or _always_returns_token()


def with_token(token: Any, *results: Any) -> Any:
    """Return the results of a call as its convention asks.

    Parameters
    ----------
    token
        The argument `token` of the call.
    results
        The value, or nothing for a call without a value.

    Returns
    -------
    With tokens (value, token), or the token alone for a call without a value. Without tokens the
    value or None. Tokens have no effect, because mpigrad keeps messages in program order.
    """
    if not returns_token(token):
        return results[0] if results else None
    if token is NO_TOKEN or token is None:
        token = jax.lax.create_token()
    return (*results, token) if results else token


# ---- Write the sender, the tag and the size of a received message into an MPI.Status ----


def _write(status: MPI.Status, nbytes: int, source: Any, tag: Any) -> np.ndarray:
    status.Set_source(int(source))
    status.Set_tag(int(tag))
    status.Set_error(MPI.SUCCESS)
    status.Set_elements(MPI.BYTE, nbytes)
    return np.zeros((), "float32")


def set_status(status: MPI.Status | None, value: Any, source: Any, tag: Any) -> Any:
    """Set `status` when the message `value` has come, and return `value`.

    Parameters
    ----------
    status
        The status of mpi4py, or None. A compiled program sets it each time it runs.
    value
        The received array.
    source, tag
        Integer scalars, the sender and the tag.
    """
    if status is None:
        return value
    write = functools.partial(_write, status, value.size * value.dtype.itemsize)
    if not isinstance(source, Tracer):
        write(source, tag)
        return value
    done = io_callback(write, jax.ShapeDtypeStruct((), np.float32), source, tag)
    return tie_in(value, done)


# ---- allreduce(SUM) with the adjoint of mpi4jax, which is the identity ----


ADJOINTS = "MPIGRAD_MPI4JAX_ADJOINTS"
_CHOICES = ("mpi4jax", "exact")


def _are_exact() -> bool:
    choice = os.environ.get(ADJOINTS) or "mpi4jax"
    if choice not in _CHOICES:
        raise ValueError(
            f"mpi4jax.allreduce: {ADJOINTS} must be {' or '.join(_CHOICES)}, got {choice!r}. "
            "Correct the environment variable, or remove it."
        )
    return choice == "exact"


def sum_over_ranks(x: Any, comm: Communicator) -> Any:
    """Sum the `x` of all ranks, with the adjoint that `MPIGRAD_MPI4JAX_ADJOINTS` selects.

    Parameters
    ----------
    x
        Array, with the same shape and dtype on every rank.
    comm
        The communicator.

    Returns
    -------
    The sum. Its adjoint is the identity, or with MPIGRAD_MPI4JAX_ADJOINTS=exact the sum again.
    The adjoint of the identity is the sum.

    Raises
    ------
    TypeError
        If MPI has no sum for the dtype of `x`.
    """
    if _are_exact():
        return allreduce(x, comm=comm)
    check_op("mpi4jax.allreduce", x, MPI.SUM)
    return bind_packed(_sum_p, x, comm, op=SUM)


_sum_p: Primitive = linear_map(
    "allreduce_of_mpi4jax",
    target="mpigrad_allreduce",
    result=lambda x, **_: x,
    in_place=True,
    attributes=lambda avals, params: {**params, "root": NO_ROOT},
    transpose=lambda ct, x, a, **params: _identity_p.bind(ct, a, **params)[0],
)

# ---- its adjoint: (x, carrier) -> x, without a message, and with the sum as its own adjoint ----


def _identity(x: Any, a: Any, **params: Any) -> list[Any]:
    return [x]


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Callable[..., list[Any]]]:
    x, a = operands

    def tangent(a: Any, tangents: Sequence[Any]) -> list[Any]:
        tx, ta = tangents
        if tx is None and ta is None:
            return [None]
        # The operand may be inactive on this rank alone.
        return _identity_p.bind(opaque_zero(ta, kind) if tx is None else tx, a, **params)

    kind = jax.typeof(x)
    return _identity_p.bind(x, a, **params), a, tangent


def _transpose(
    cotangents: Sequence[Any],
    operands: Sequence[Any],
    linear: tuple[bool, ...],
    params: dict[str, Any],
) -> list[Any]:
    site = abs(params["site"])
    return [_sum_p.bind(cotangents[0], operands[1], **{**params, "site": site})[0], None]


def _batch(args: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]) -> Any:
    (x, a), (dx, da) = args, dims
    return _identity_p.bind(x, a if da is None else a.sum(), **params), [dx]


_identity_p = primitive(
    "adjoint_of_mpi4jax_allreduce",
    shapes=lambda x, a, **params: [x],
    run=_identity,
    impl=_identity,
    messages=False,
    differentiate=_differentiate,
    transpose=_transpose,
    batch=_batch,
)
