"""Messages between two ranks: send, recv."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.any_source import recv_any_p, recv_from_p
from mpigrad.operations.carrier import carrier
from mpigrad.operations.primitive import linear_map
from mpigrad.operations.pytree_packing import Packing
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import TAG_LIMIT

__all__ = ["recv", "recv_with_status", "send"]


def _send_transpose(ct: None, x: Any, a: Any, *, dest: int, tag: int, **where: int) -> Any:
    return recv_p.bind(jnp.zeros(x.shape, x.dtype), a, source=dest, tag=tag, **where)[0]


def _recv_transpose(ct: Any, x: Any, a: Any, *, source: int, tag: int, **where: int) -> Any:
    send_p.bind(ct, a, dest=source, tag=tag, **where)
    return jnp.zeros(x.shape, x.dtype)  # only the shape of `like` counts


send_p: Primitive = linear_map(
    "send", result=lambda x, **_: None, transpose=_send_transpose, separate_tags=True
)
recv_p: Primitive = linear_map(
    "recv",
    result=lambda x, **_: ShapedArray(x.shape, x.dtype),
    n_inputs=0,
    transpose=_recv_transpose,
    separate_tags=True,
)


def check_tag(value: int, what: str) -> int:
    """`value` as the tag of a message that is not a wildcard."""
    if isinstance(value, (int, np.integer)) and value == MPI.ANY_TAG:
        raise ValueError(f"{what}: the wildcard MPI.ANY_TAG is for receives; name the tag")
    if not isinstance(value, (int, np.integer)) or not 0 <= value <= TAG_LIMIT:
        raise ValueError(f"{what}={value!r} must be an integer from 0 to {TAG_LIMIT}")
    return int(value)


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
    comm, packing = resolve(comm), Packing.of(x)
    params = {
        "comm": comm.slot,
        "dest": check_rank(dest, comm, "send: dest", null=True),
        "tag": check_tag(tag, "send: tag"),
    }
    a = carrier()
    for message, tree in zip(packing.pack(x), packing.in_words, strict=True):
        send_p.bind(message, a, site=call_site(tree), **params)


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
    comm, packing, a = resolve(comm), Packing.of(like), carrier()
    params = {
        "comm": comm.slot,
        "source": check_rank(source, comm, "recv: source", null=True),
        "tag": check_tag(tag, "recv: tag"),
    }
    messages = zip(packing.pack(like), packing.in_words, strict=True)
    return packing.unpack([recv_p.bind(m, a, site=call_site(t), **params)[0] for m, t in messages])


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
    a, packing = carrier(), Packing.of(like)
    sites = [call_site(tree) for tree in packing.in_words]
    messages = packing.pack(like)
    if not messages:
        raise ValueError("recv: like has no arrays, so that there is no message with a sender")
    first, envelope = recv_any_p.bind(
        messages[0], a, comm=comm.slot, site=sites[0], source=source, tag=tag
    )
    received = [first]
    # The other dtypes, from the same sender.
    for message, site in zip(messages[1:], sites[1:], strict=True):
        received += recv_from_p.bind(envelope, message, a, comm=comm.slot, site=site)
    return packing.unpack(received), envelope[0], envelope[1]
