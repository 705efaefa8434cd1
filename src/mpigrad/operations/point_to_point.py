"""Messages between two ranks: send, recv, sendrecv."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.activity import carrier
from mpigrad.operations.factory import is_differentiable, linear_map
from mpigrad.operations.sites import call_site

__all__ = ["recv", "send", "sendrecv"]


def _send_transpose(ct: None, x: Any, a: Any, *, dest: int, tag: int, **where: int) -> Any:
    return recv_p.bind(jnp.zeros(x.shape, x.dtype), a, source=dest, tag=tag, **where)[0]


def _recv_transpose(ct: Any, x: Any, a: Any, *, source: int, tag: int, **where: int) -> Any:
    send_p.bind(ct, a, dest=source, tag=tag, **where)
    return jnp.zeros(x.shape, x.dtype)  # only the shape of `like` counts


def _sendrecv_transpose(ct: Any, x: Any, a: Any, **p: Any) -> Any:
    # The way back: partners and tags change places.
    p.update(
        dest=p["source"], sendtag=p["recvtag"], source=p["dest"], recvtag=p["sendtag"],
        shape=tuple(x.shape), dtype=np.dtype(x.dtype),
    )  # fmt: skip
    return sendrecv_p.bind(ct, a, **p)[0]


def _without_type(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name not in ("shape", "dtype")}


def _batched_result(params: dict[str, Any], n: int) -> dict[str, Any]:
    return {**params, "shape": (n, *params["shape"])}


send_p: Primitive = linear_map("send", result=lambda x, **_: None, transpose=_send_transpose)
recv_p: Primitive = linear_map(
    "recv",
    result=lambda x, **_: ShapedArray(x.shape, x.dtype),
    takes_data=False,
    transpose=_recv_transpose,
)
sendrecv_p: Primitive = linear_map(
    "sendrecv",
    result=lambda x, *, shape, dtype, **_: ShapedArray(shape, dtype),
    attributes=_without_type,
    batch_params=_batched_result,
    transpose=_sendrecv_transpose,
)


def _check_tag(value: int, what: str) -> int:
    limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
    if not isinstance(value, (int, np.integer)) or not 0 <= value <= limit:
        raise ValueError(f"{what}={value!r} must be an integer from 0 to {limit}")
    return int(value)


def _check_source(value: int, comm: Communicator, what: str) -> int:
    if value == MPI.ANY_SOURCE:
        raise ValueError(
            f"{what}: a wildcard source is not supported yet, since the adjoint has to know the "
            "sender when it is traced; name the source"
        )
    return check_rank(value, comm, what, null=True)


def send(x: Any, dest: int, tag: int = 0, comm: Communicator | None = None) -> None:
    """Send `x` to the rank `dest`, which must `recv` it.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype (one message for each array).
    dest
        The receiver: a Python integer. MPI.PROC_NULL: nobody.
    tag
        Matched by the tag of the receive.

    Notes
    -----
    The adjoint is a receive from `dest`.
    """
    comm = resolve(comm)
    params = {
        "comm": comm.slot,
        "site": call_site(),
        "dest": check_rank(dest, comm, "send: dest", null=True),
        "tag": _check_tag(tag, "send: tag"),
    }
    for leaf in jax.tree.leaves(x):
        send_p.bind(jnp.asarray(leaf), carrier(), **params)


def recv(like: Any, source: int, tag: int = 0, comm: Communicator | None = None) -> Any:
    """What the rank `source` sends.

    Parameters
    ----------
    like
        Array or pytree of arrays with the shapes and dtypes of the message; the values do not
        count, and may be constants.
    source
        The sender: a Python integer. MPI.PROC_NULL: nobody, the result is zero.
    tag
        Matched by the tag of the send.

    Returns
    -------
    The received values, in the shapes of `like`. The adjoint is a send to `source`.
    """
    comm = resolve(comm)
    params = {
        "comm": comm.slot,
        "site": call_site(),
        "source": _check_source(source, comm, "recv: source"),
        "tag": _check_tag(tag, "recv: tag"),
    }
    return jax.tree.map(lambda leaf: recv_p.bind(jnp.asarray(leaf), carrier(), **params)[0], like)


def sendrecv(
    x: Any,
    dest: int,
    source: int,
    sendtag: int = 0,
    recvtag: int = 0,
    like: Any = None,
    comm: Communicator | None = None,
) -> Any:
    """Send `x` to `dest` and receive from `source`, without the danger of a deadlock.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype.
    dest, source
        Partners: Python integers, or MPI.PROC_NULL (nobody; what is received is zero).
    sendtag, recvtag
        The `sendtag` of the sender equals the `recvtag` of the receiver.
    like
        Shapes and dtypes of what is received, where they differ from those of `x`.

    Returns
    -------
    The received values. The adjoint is a sendrecv with partners exchanged and tags exchanged.
    """
    comm = resolve(comm)
    params = {
        "comm": comm.slot,
        "site": call_site(),
        "dest": check_rank(dest, comm, "sendrecv: dest", null=True),
        "sendtag": _check_tag(sendtag, "sendrecv: sendtag"),
        "source": _check_source(source, comm, "sendrecv: source"),
        "recvtag": _check_tag(recvtag, "sendrecv: recvtag"),
    }

    def one(leaf: Any, template: Any) -> Any:
        leaf = jnp.asarray(leaf)
        shape, dtype = jnp.shape(template), np.dtype(jnp.result_type(template))
        if is_differentiable(dtype) != is_differentiable(leaf.dtype):
            raise TypeError(
                f"sendrecv: x is {leaf.dtype} and like is {dtype}: one has a derivative, the "
                "other none; use send and recv"
            )
        return sendrecv_p.bind(leaf, carrier(), shape=tuple(shape), dtype=dtype, **params)[0]

    return jax.tree.map(one, x, x if like is None else like)
