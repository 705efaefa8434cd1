"""Messages that are posted first and waited for later: isend, irecv, wait, waitall."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.operations.carrier import carrier
from mpigrad.operations.point_to_point import check_tag
from mpigrad.operations.pytree_packing import Packing
from mpigrad.operations.requests import (
    arrive_any_p,
    arrive_p,
    irecv_any_p,
    irecv_p,
    isend_p,
    sent_p,
)
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import at_exit, library

__all__ = ["Request", "irecv", "isend", "post", "wait", "wait_with_status", "waitall"]


_posts = itertools.count()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tickets"],
    meta_fields=["kind", "peer", "tag", "comm", "packing"],
)
@dataclass(frozen=True)
class Request:
    """A message under way. `wait` for it once, in the function that has posted it.

    A pytree: it may be carried by `scan`, returned from and passed to compiled functions.
    """

    tickets: tuple[Any, ...]
    kind: Literal["isend", "irecv"]
    peer: int
    tag: int
    comm: int
    packing: Packing
    # The position among all posts. It is unknown when a compiled function or a loop has returned
    # the request: no part of the pytree.
    order: int = field(default=-1, init=False)

    def posted_now(self) -> Request:
        """The same message, the last of all posts so far."""
        request = replace(self)
        object.__setattr__(request, "order", next(_posts))
        return request


@functools.cache
def _report_forgotten_at_exit() -> None:
    lib = library()

    def report() -> None:
        lines = lib.mpigrad_pending_requests().decode().splitlines()
        for line in dict.fromkeys(lines):
            sys.stderr.write(
                f"mpigrad: rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}: nobody has waited "
                f"for the request of {line}, so that its message, and its adjoint, may be lost; "
                "call wait(request)\n"
            )
        sys.stderr.flush()

    at_exit(report)


def post(kind: Literal["isend", "irecv"], tree: Any, peer: int, tag: int, slot: int) -> Request:
    """`isend` or `irecv` in the message space of a slot, which may be that of derivatives."""
    _report_forgotten_at_exit()
    name = "dest" if kind == "isend" else "source"
    primitive = isend_p if kind == "isend" else irecv_any_p if _is_wild(peer, tag) else irecv_p
    packing, a = Packing.of(tree), carrier()
    params = {"comm": slot, name: peer, "tag": tag, "lanes": ()}
    messages = zip(packing.pack(tree), packing.in_words, strict=True)
    tickets = tuple(primitive.bind(m, a, site=call_site(w), **params)[0] for m, w in messages)
    return Request(tickets, kind, peer, tag, slot, packing).posted_now()


def _is_wild(source: int, tag: int) -> bool:
    return source == MPI.ANY_SOURCE or tag == MPI.ANY_TAG


def isend(x: Any, dest: int, tag: int = 0, comm: Communicator | None = None) -> Request:
    """Begin to send `x` to the rank `dest`, and go on.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype: one message for each dtype. It is copied.
    dest
        The receiver: a Python integer. MPI.PROC_NULL: nobody.
    tag
        Matched by the tag of the receive, which may be `recv` or `irecv`.

    Returns
    -------
    The request, for `wait`. The adjoint is a receive from `dest`: posted where the program waits
    for the request, and waited for here.
    """
    comm = resolve(comm)
    dest = check_rank(dest, comm, "isend: dest", null=True)
    return post("isend", x, dest, check_tag(tag, "isend: tag"), comm.slot)


def irecv(like: Any, source: int, tag: int = 0, comm: Communicator | None = None) -> Request:
    """Begin to receive what the rank `source` sends, and go on.

    Parameters
    ----------
    like
        Array or pytree of arrays with the shapes and dtypes of the message; the values do not
        count, and may be constants.
    source
        The sender: a Python integer, or MPI.ANY_SOURCE. MPI.PROC_NULL: nobody, the result is zero.
    tag
        Matched by the tag of the send, which may be `send` or `isend`; MPI.ANY_TAG matches every
        tag. With a wildcard, here or as the source, all arrays have the same dtype.

    Returns
    -------
    The request, for `wait`, which returns what has arrived, or `wait_with_status`. The adjoint is a
    send to the rank that has sent: posted where the program waits for the request, and waited for
    here.

    Notes
    -----
    Tangents of what comes from anyone are received by `wait`: nobody knows before from whom. In
    forward mode a sender of a long message by `send` waits until then; `isend` does not. Between
    post and wait, no other derivative may be received from the same rank with the same tag, nor
    its receive be posted.
    """
    comm = resolve(comm)
    if source != MPI.ANY_SOURCE:
        source = check_rank(source, comm, "irecv: source", null=True)
    if tag != MPI.ANY_TAG:
        tag = check_tag(tag, "irecv: tag")
    if source == MPI.PROC_NULL:
        tag = max(tag, 0)
    elif _is_wild(source, tag):
        dtypes = [dtype for _, dtype in Packing.of(like).messages]
        if len(dtypes) != 1:
            raise ValueError(
                "irecv from anyone, or with any tag, takes arrays of one dtype, which travel as "
                f"one message, not of {', '.join(map(str, dtypes)) or 'none at all'}; receive "
                "them by `recv_with_status`, or name source and tag"
            )
    return post("irecv", like, source, tag, comm.slot)


def _is_request(request: Any) -> Request:
    if not isinstance(request, Request):
        raise TypeError(f"wait takes a request of isend or irecv, not {type(request).__name__}")
    return request


def wait(request: Request) -> Any:
    """Wait until the message of a request has been sent or has arrived.

    Parameters
    ----------
    request
        Of `isend` or `irecv`, not yet waited for, and posted in the same function: not outside of
        the one that is differentiated or mapped by `vmap`. In a function that is differentiated,
        messages between the same ranks with the same tag are waited for in the order of their
        posts.

    Returns
    -------
    The received values for `irecv`, None for `isend`. The adjoint is the post of a message the
    other way: `isend` of the cotangent for `irecv`, `irecv` of it for `isend`.
    """
    return _completed(_is_request(request))[0]


def wait_with_status(request: Request) -> tuple[Any, Any, Any]:
    """Wait until the message of a request has arrived; what it is, who has sent it, and its tag.

    Parameters
    ----------
    request
        Of `irecv`, as for `wait`.

    Returns
    -------
    value
        The received values, in the shapes of `like`.
    source, tag
        Integer scalars (int32). The adjoint is a send to this rank with this tag.
    """
    if _is_request(request).kind == "isend":
        raise TypeError("wait_with_status takes a request of irecv; wait for this one of isend")
    value, envelope = _completed(request)
    if envelope is not None:
        return value, envelope[0], envelope[1]
    tag = request.tag if request.peer != MPI.PROC_NULL else MPI.ANY_TAG
    return value, jnp.int32(request.peer), jnp.int32(tag)


def _completed(request: Request) -> tuple[Any, Any]:
    """What has arrived, and the envelope of a receive from anyone."""
    sends, wild = request.kind == "isend", _is_wild(request.peer, request.tag)
    primitive = sent_p if sends else arrive_any_p if wild else arrive_p
    params: dict[str, Any] = {"comm": request.comm, "dest" if sends else "source": request.peer}
    if not wild:
        params["tag"] = request.tag
    a, packing = carrier(), request.packing
    results: list[Any] = []
    messages = zip(request.tickets, packing.messages, packing.in_words, strict=True)
    for ticket, (shape, dtype), tree in messages:
        site = call_site(tree)
        results += primitive.bind(ticket, a, shape=shape, dtype=dtype, site=site, **params)
    envelope = results.pop() if wild else None
    return None if sends else packing.unpack(results), envelope


def in_order_of_posts(
    wait_for: Callable[[list[Request]], list[Any]], requests: Iterable[Request]
) -> list[Any]:
    """What `wait_for` gives for the requests in the order of their posts, in the order given."""
    given = list(map(_is_request, requests))
    positions = list(range(len(given)))
    if all(request.order >= 0 for request in given):
        positions.sort(key=lambda i: given[i].order)
    results = wait_for([given[i] for i in positions])
    return [
        result for _, result in sorted(zip(positions, results, strict=True), key=lambda p: p[0])
    ]


def waitall(requests: Iterable[Request]) -> list[Any]:
    """`wait` for each of the requests, in the order of their posts; results in the order given.

    In the order given, too, where a compiled function or a loop has returned one of the requests.

    The adjoint posts a message the other way for each, in reverse order.
    """
    return in_order_of_posts(lambda requests: list(map(wait, requests)), requests)
