"""Messages between two ranks: send and recv."""

from __future__ import annotations

from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.carrier import carrier
from mpigrad.operations.primitive import linear_map
from mpigrad.operations.pytree_packing import Packing
from mpigrad.operations.requests import recv_any_p, recv_from_p
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import TAG_LIMIT

__all__ = ["recv", "recv_with_status", "send"]

T = TypeVar("T")


def _send_transpose(ct: None, x: Any, a: Any, *, dest: int, tag: int, **where: int) -> Any:
    return recv_p.bind(jnp.zeros(x.shape, x.dtype), a, source=dest, tag=tag, **where)[0]


def _recv_transpose(ct: Any, x: Any, a: Any, *, source: int, tag: int, **where: int) -> Any:
    send_p.bind(ct, a, dest=source, tag=tag, **where)
    return jnp.zeros(x.shape, x.dtype)  # only the shape of `like` is used


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
    """Return `value` as the tag of a message, or raise an error that names the argument."""
    if isinstance(value, (int, np.integer)) and value == MPI.ANY_TAG:
        raise ValueError(
            f"{what} must be one tag, got the wildcard MPI.ANY_TAG, which is for receives. Give "
            f"an integer from 0 to {TAG_LIMIT}."
        )
    if not isinstance(value, (int, np.integer)) or not 0 <= value <= TAG_LIMIT:
        raise ValueError(
            f"{what} must be an integer from 0 to {TAG_LIMIT}, got {value!r} on rank "
            f"{MPI.COMM_WORLD.rank}. Choose another tag."
        )
    return int(value)


def send(x: Any, dest: int, tag: int = 0, comm: Communicator | None = None) -> None:
    """Send `x` to the rank `dest`, which must receive it.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype. One message is sent for each dtype.
    dest
        The receiver: a Python integer. It may be this rank, which receives the message later. With
        MPI.PROC_NULL nothing is sent.
    tag
        The tag, an integer, which the receive matches.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Notes
    -----
    The adjoint is a receive from `dest`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> rank = mg.default_communicator().rank
    >>> mg.send(jnp.arange(3.0), dest=rank, tag=7)
    >>> mg.recv(jnp.zeros(3), source=rank, tag=7)
    Array([0., 1., 2.], dtype=float32)
    """
    comm, packing = resolve(comm), Packing.of(x, "send")
    params = {
        "comm": comm.slot,
        "dest": check_rank(dest, comm, "send: dest", null=True),
        "tag": check_tag(tag, "send: tag"),
    }
    a = carrier()
    for message, tree in zip(packing.pack(x), packing.descriptions, strict=True):
        send_p.bind(message, a, site=call_site(tree), **params)


def recv(
    like: T,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    comm: Communicator | None = None,
) -> T:
    """Receive the values that the rank `source` sends.

    Parameters
    ----------
    like
        Array or pytree of arrays with the shapes and dtypes of the message. Its values are not used
        and may be constants.
    source
        The sender: a Python integer, or MPI.ANY_SOURCE. With MPI.PROC_NULL nothing is received, and
        the result is zero.
    tag
        The tag of the send. MPI.ANY_TAG matches every tag.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    The received values, in the structure and shapes of `like`. The adjoint is a send to the rank
    that has sent, with the tag that it has used; `recv_with_status` returns both.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> rank = mg.default_communicator().rank
    >>> mg.send({"u": jnp.ones(2)}, dest=rank)
    >>> mg.recv({"u": jnp.zeros(2)}, source=rank)
    {'u': Array([1., 1.], dtype=float32)}
    """
    if source == MPI.ANY_SOURCE or tag == MPI.ANY_TAG:
        return recv_with_status(like, source, tag, comm)[0]
    comm, packing, a = resolve(comm), Packing.of(like, "recv", "like"), carrier()
    params = {
        "comm": comm.slot,
        "source": check_rank(source, comm, "recv: source", null=True),
        "tag": check_tag(tag, "recv: tag"),
    }
    messages = zip(packing.pack(like), packing.descriptions, strict=True)
    return packing.unpack([recv_p.bind(m, a, site=call_site(t), **params)[0] for m, t in messages])


def recv_with_status(
    like: T,
    source: int = MPI.ANY_SOURCE,
    tag: int = MPI.ANY_TAG,
    comm: Communicator | None = None,
) -> tuple[T, Any, Any]:
    """Receive the values that some rank sends, and return also the sender and the tag.

    Parameters
    ----------
    like
        Array or pytree of arrays with the shapes and dtypes of the message. Its values are not used
        and may be constants.
    source
        The sender: a Python integer, or MPI.ANY_SOURCE. With MPI.PROC_NULL nothing is received, and
        the result is zero.
    tag
        The tag of the send. MPI.ANY_TAG matches every tag.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    value
        The received values, in the structure and shapes of `like`.
    source, tag
        Integer scalars (int32). The adjoint is a send to this rank with this tag.

    Notes
    -----
    Two runs of a program may receive messages in different orders. A program and its derivatives
    may not: the messages of derivatives travel separately. Under `jax.checkpoint`, too, a message
    is received once, and its sender is recorded.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> rank = mg.default_communicator().rank
    >>> mg.send(jnp.ones(2), dest=rank, tag=5)
    >>> value, source, tag = mg.recv_with_status(jnp.zeros(2))
    >>> int(source) == rank, int(tag)
    (True, 5)
    """
    comm = resolve(comm)
    if tag != MPI.ANY_TAG:
        tag = check_tag(tag, "recv: tag")
    if source != MPI.ANY_SOURCE:
        source = check_rank(source, comm, "recv: source", null=True)
    if source == MPI.PROC_NULL:
        nothing = recv(like, source, 0, comm)
        return nothing, jnp.int32(MPI.PROC_NULL), jnp.int32(MPI.ANY_TAG)
    a, packing = carrier(), Packing.of(like, "recv", "like")
    sites = [call_site(tree) for tree in packing.descriptions]
    messages = packing.pack(like)
    if not messages:
        raise ValueError(
            "recv: like must have at least one array if source or tag is a wildcard, got an empty "
            "pytree. Name source and tag."
        )
    first, envelope = recv_any_p.bind(
        messages[0], a, comm=comm.slot, site=sites[0], source=source, tag=tag
    )
    received = [first]
    # The other dtypes, from the same sender.
    for message, site in zip(messages[1:], sites[1:], strict=True):
        received += recv_from_p.bind(envelope, message, a, comm=comm.slot, site=site)
    return packing.unpack(received), envelope[0], envelope[1]
