"""Messages between two ranks: send, recv, sendrecv."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.activity import carrier
from mpigrad.operations.factory import is_differentiable, linear_map
from mpigrad.operations.packing import Packing
from mpigrad.operations.sites import call_site
from mpigrad.operations.wildcard import recv_any_p, recv_from_p

__all__ = ["recv", "recv_with_status", "send", "sendrecv"]


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


send_p: Primitive = linear_map(
    "send", result=lambda x, **_: None, transpose=_send_transpose, own_space=True
)
recv_p: Primitive = linear_map(
    "recv",
    result=lambda x, **_: ShapedArray(x.shape, x.dtype),
    takes_data=False,
    transpose=_recv_transpose,
    own_space=True,
)
sendrecv_p: Primitive = linear_map(
    "sendrecv",
    result=lambda x, *, shape, dtype, **_: ShapedArray(shape, dtype),
    attributes=_without_type,
    batch_params=_batched_result,
    transpose=_sendrecv_transpose,
    own_space=True,
)


def check_tag(value: int, what: str) -> int:
    """`value` as the tag of a message that is not a wildcard."""
    limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
    if isinstance(value, (int, np.integer)) and value == MPI.ANY_TAG:
        raise ValueError(
            f"{what}: a wildcard tag is for `recv` only; name the tag, or receive with `recv`"
        )
    if not isinstance(value, (int, np.integer)) or not 0 <= value <= limit:
        raise ValueError(f"{what}={value!r} must be an integer from 0 to {limit}")
    return int(value)


def check_source(value: int, comm: Communicator, what: str) -> int:
    """`value` as a rank to receive from that is not a wildcard."""
    if value == MPI.ANY_SOURCE:
        raise ValueError(
            f"{what}: a wildcard source is for `recv` only; name the source, or receive with `recv`"
        )
    return check_rank(value, comm, what, null=True)


def send(x: Any, dest: int, tag: int = 0, comm: Communicator | None = None) -> None:
    """Send `x` to the rank `dest`, which must `recv` it.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype: one message for each dtype.
    dest
        The receiver: a Python integer. This rank itself may receive later what it sends now.
        MPI.PROC_NULL: nobody.
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
        "tag": check_tag(tag, "send: tag"),
    }
    a = carrier()
    for message in Packing.of(x).pack(x):
        send_p.bind(message, a, **params)


def recv(
    like: Any,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    comm: Communicator | None = None,
) -> Any:
    """What the rank `source` sends.

    Parameters
    ----------
    like
        Array or pytree of arrays with the shapes and dtypes of the message; the values do not
        count, and may be constants.
    source
        The sender: a Python integer, or MPI.ANY_SOURCE. MPI.PROC_NULL: nobody, the result is zero.
    tag
        Matched by the tag of the send; MPI.ANY_TAG matches every tag.

    Returns
    -------
    The received values, in the shapes of `like`. The adjoint is a send to the rank that has sent,
    with the tag that it has used; `recv_with_status` tells both.
    """
    if source == MPI.ANY_SOURCE or tag == MPI.ANY_TAG:
        return recv_with_status(like, source, tag, comm)[0]
    comm = resolve(comm)
    params = {
        "comm": comm.slot,
        "site": call_site(),
        "source": check_rank(source, comm, "recv: source", null=True),
        "tag": check_tag(tag, "recv: tag"),
    }
    packing, a = Packing.of(like), carrier()
    return packing.unpack([recv_p.bind(m, a, **params)[0] for m in packing.pack(like)])


def recv_with_status(
    like: Any,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    comm: Communicator | None = None,
) -> tuple[Any, Any, Any]:
    """What some rank sends, who has sent it, and with which tag.

    Parameters
    ----------
    like
        Array or pytree of arrays with the shapes and dtypes of the message; the values do not
        count, and may be constants.
    source
        The sender: a Python integer, or MPI.ANY_SOURCE. MPI.PROC_NULL: nobody, the result is zero.
    tag
        Matched by the tag of the send; MPI.ANY_TAG matches every tag.

    Returns
    -------
    value
        The received values, in the shapes of `like`.
    source, tag
        Integer scalars (int32). The adjoint is a send to this rank with this tag.

    Notes
    -----
    Which message comes first may differ between two runs of a program, but not between a program
    and its derivatives, which travel apart from the program's own messages: under
    `jax.checkpoint`, too, a message is received once, and its sender recorded.
    """
    comm = resolve(comm)
    if tag != MPI.ANY_TAG:
        tag = check_tag(tag, "recv: tag")
    if source != MPI.ANY_SOURCE:
        source = check_rank(source, comm, "recv: source", null=True)
    if source == MPI.PROC_NULL:
        nothing = recv(like, source, 0, comm)
        return nothing, jnp.int32(MPI.PROC_NULL), jnp.int32(MPI.ANY_TAG)
    site, a, packing = call_site(), carrier(), Packing.of(like)
    messages = packing.pack(like)
    if not messages:
        raise ValueError("recv: like has no arrays, so that there is no message with a sender")
    first, envelope = recv_any_p.bind(
        messages[0], a, comm=comm.slot, site=site, source=source, tag=tag
    )
    received = [first]
    for message in messages[1:]:  # the other dtypes, from the same sender
        received += recv_from_p.bind(envelope, message, a, comm=comm.slot, site=site)
    return packing.unpack(received), envelope[0], envelope[1]


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
        Array or pytree of arrays of any dtype: one message for each dtype.
    dest, source
        Partners: Python integers, or MPI.PROC_NULL (nobody; what is received is zero).
    sendtag, recvtag
        The `sendtag` of the sender equals the `recvtag` of the receiver.
    like
        Structure, shapes and dtypes of what is received, where they differ from those of `x`.

    Returns
    -------
    The received values. The adjoint is a sendrecv with partners exchanged and tags exchanged.
    """
    comm = resolve(comm)
    site, a = call_site(), carrier()
    dest = check_rank(dest, comm, "sendrecv: dest", null=True)
    source = check_source(source, comm, "sendrecv: source")
    sendtag = check_tag(sendtag, "sendrecv: sendtag")
    recvtag = check_tag(recvtag, "sendrecv: recvtag")
    like = x if like is None else like
    packing = Packing.of(like)
    outgoing, incoming = Packing.of(x).pack(x), packing.pack(like)
    received: list[Any] = []
    # The k-th message goes out while the k-th comes in: first those with a derivative, which
    # cannot share a sendrecv with those that have none. Where one side has more, nobody takes part.
    for active in (True, False):
        out = [m for m in outgoing if is_differentiable(m.dtype) == active]
        into = [m for m in incoming if is_differentiable(m.dtype) == active]
        nothing = jnp.zeros(0, "float32" if active else "int32")
        for k in range(max(len(out), len(into))):
            template = into[k] if k < len(into) else nothing
            (y,) = sendrecv_p.bind(
                out[k] if k < len(out) else nothing,
                a,
                comm=comm.slot,
                site=site,
                dest=dest if k < len(out) else MPI.PROC_NULL,
                sendtag=sendtag,
                source=source if k < len(into) else MPI.PROC_NULL,
                recvtag=recvtag,
                shape=tuple(template.shape),
                dtype=np.dtype(template.dtype),
            )
            if k < len(into):
                received.append(y)
    return packing.unpack(received)
