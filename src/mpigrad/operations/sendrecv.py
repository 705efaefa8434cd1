"""Send and receive in one operation: sendrecv."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.carrier import carrier
from mpigrad.operations.nonblocking import isend, wait
from mpigrad.operations.point_to_point import check_tag, recv
from mpigrad.operations.primitive import is_differentiable, linear_map
from mpigrad.operations.pytree_packing import Packing
from mpigrad.runtime.call_sites import call_site

__all__ = ["sendrecv"]

T = TypeVar("T")


def _transpose(ct: Any, x: Any, a: Any, **p: Any) -> Any:
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


sendrecv_p: Primitive = linear_map(
    "sendrecv",
    result=lambda x, *, shape, dtype, **_: ShapedArray(shape, dtype),
    attributes=_without_type,
    batch_params=_batched_result,
    transpose=_transpose,
    separate_tags=True,
)


def _select(
    differentiable: bool, messages: list[Any], packing: Packing
) -> tuple[list[Any], list[str]]:
    """Return the messages with a derivative, or without, and the descriptions of their leaves."""
    pairs = zip(messages, packing.descriptions, strict=True)
    chosen = [(m, w) for m, w in pairs if is_differentiable(m.dtype) == differentiable]
    return [m for m, _ in chosen], [w for _, w in chosen]


def _nothing(differentiable: bool) -> jax.Array:
    return jnp.zeros(0, "float32" if differentiable else "int32")


@overload
def sendrecv(
    x: T,
    dest: int,
    source: int,
    sendtag: int = 0,
    recvtag: int = 0,
    like: None = None,
    comm: Communicator | None = None,
) -> T: ...


@overload
def sendrecv(
    x: Any,
    dest: int,
    source: int,
    sendtag: int = 0,
    recvtag: int = 0,
    *,
    like: T,
    comm: Communicator | None = None,
) -> T: ...


def sendrecv(
    x: Any,
    dest: int,
    source: int,
    sendtag: int = 0,
    recvtag: int = 0,
    like: Any = None,
    comm: Communicator | None = None,
) -> Any:
    """Send `x` to `dest` and receive from `source` at the same time, without deadlock.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype. One message is sent for each dtype.
    dest
        The receiver of `x`: a Python integer, or MPI.PROC_NULL to send nothing.
    source
        The sender of the result: a Python integer, or MPI.ANY_SOURCE. With MPI.PROC_NULL nothing is
        received, and the result is zero.
    sendtag, recvtag
        The `sendtag` of the sender equals the `recvtag` of the receiver, which may be MPI.ANY_TAG.
    like
        Array or pytree of arrays with the shapes and dtypes of the result. Default: `x`.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    The received values. The adjoint is a sendrecv with partners exchanged and tags exchanged. With
    a wildcard, it sends to the rank that has sent. To know that rank in the program, call
    `recv_with_status` between `isend` and `wait`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> comm = mg.default_communicator()
    >>> mg.sendrecv(jnp.ones(2), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
    Array([1., 1.], dtype=float32)
    """
    comm = resolve(comm)
    like = x if like is None else like
    dest = check_rank(dest, comm, "sendrecv: dest", null=True)
    sendtag = check_tag(sendtag, "sendrecv: sendtag")
    if source == MPI.ANY_SOURCE or recvtag == MPI.ANY_TAG:
        if not jax.tree.leaves(like):
            raise ValueError(
                "sendrecv: like must have at least one array if source or recvtag is a wildcard, "
                "got an empty pytree. Name source and recvtag."
            )
        request = isend(x, dest, sendtag, comm)
        received = recv(like, source, recvtag, comm)
        wait(request)
        return received
    source = check_rank(source, comm, "sendrecv: source", null=True)
    recvtag = check_tag(recvtag, "sendrecv: recvtag")
    sent = Packing.of(x, "sendrecv")
    packing = sent if like is x else Packing.of(like, "sendrecv", "like")
    a = carrier()
    outgoing = sent.pack(x)
    incoming = outgoing if like is x else packing.pack(like)
    received: list[Any] = []
    # The k-th message goes out while the k-th comes in. A message with a derivative cannot share a
    # sendrecv with one without: the former come first. If there are more messages in one
    # direction, the partner of the other direction is MPI.PROC_NULL.
    for differentiable in (True, False):
        out, out_trees = _select(differentiable, outgoing, sent)
        into, into_trees = _select(differentiable, incoming, packing)
        for k in range(max(len(out), len(into))):
            sends, receives = k < len(out), k < len(into)
            template = into[k] if receives else _nothing(differentiable)
            trees = {*out_trees[k : k + 1], *into_trees[k : k + 1]}
            # A call site has one tree: if the two differ, the guard compares neither.
            site = call_site(trees.pop() if len(trees) == 1 else "? both ways")
            (y,) = sendrecv_p.bind(
                out[k] if sends else _nothing(differentiable),
                a,
                comm=comm.slot,
                site=site,
                dest=dest if sends else MPI.PROC_NULL,
                sendtag=sendtag,
                source=source if receives else MPI.PROC_NULL,
                recvtag=recvtag,
                shape=tuple(template.shape),
                dtype=np.dtype(template.dtype),
            )
            if receives:
                received.append(y)
    return packing.unpack(received)
