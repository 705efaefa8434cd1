"""Messages that are posted first and waited for later: isend, irecv, wait, waitall.

A post returns a *ticket*, a number that stands for the pending message, and the wait takes it. To
JAX the ticket of a message with a derivative is a linear function of the message, and what arrives
is a linear function of the ticket; so the tangent's ticket goes to the tangent's wait, and from
the wait back to the post in the adjoint, on whatever way the program carries the request: through
loops, branches and compiled functions. The adjoint of a wait is a post, and of a post a wait.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.native import at_exit, library
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.activity import carrier
from mpigrad.operations.factory import is_differentiable, linear_map
from mpigrad.operations.packing import Packing
from mpigrad.operations.point_to_point import check_source, check_tag
from mpigrad.operations.sites import call_site

__all__ = ["Request", "irecv", "isend", "post", "wait", "waitall"]


def _ticket(x: Any, *, lanes: tuple[int, ...], **_: Any) -> ShapedArray:
    """Of a batch there is one message and one ticket, repeated for each member (`lanes`)."""
    return ShapedArray(lanes, np.dtype("float32" if is_differentiable(x.dtype) else "int32"))


def _batched_ticket(params: dict[str, Any], n: int) -> dict[str, Any]:
    return {**params, "lanes": (n, *params["lanes"])}


def _batched_result(params: dict[str, Any], n: int) -> dict[str, Any]:
    return {**params, "shape": (n, *params["shape"])}


def _only(*names: str) -> Any:
    """The parameters that the handler takes."""
    return lambda avals, params: {name: params[name] for name in ("comm", "site", *names)}


def _irecv_attributes(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    x = avals[0]
    size = {"bytes": math.prod(x.shape) * x.dtype.itemsize, "element_bytes": x.dtype.itemsize}
    return {**_only("source", "tag")(avals, params), **size}


def _isend_transpose(ct: Any, x: Any, a: Any, *, dest: int, lanes: Any, **p: Any) -> Any:
    return arrive_p.bind(ct, a, source=dest, shape=tuple(x.shape), dtype=np.dtype(x.dtype), **p)[0]


def _arrive_transpose(
    ct: Any, x: Any, a: Any, *, source: int, shape: Any, dtype: Any, **p: Any
) -> Any:
    return isend_p.bind(ct, a, dest=source, lanes=tuple(x.shape), **p)[0]


def _irecv_transpose(ct: Any, x: Any, a: Any, *, source: int, lanes: Any, **p: Any) -> Any:
    sent_p.bind(ct, a, dest=source, shape=tuple(x.shape), dtype=np.dtype(x.dtype), **p)
    return jnp.zeros(x.shape, x.dtype)  # only the shape of `like` counts


def _sent_transpose(
    ct: None, x: Any, a: Any, *, dest: int, shape: Any, dtype: Any, **p: Any
) -> Any:
    return irecv_p.bind(jnp.zeros(shape, dtype), a, source=dest, lanes=tuple(x.shape), **p)[0]


def _posted_outside(ta: Any, ticket: Any) -> Any:
    raise ValueError(
        "wait: the request was posted outside of the function that is differentiated, so that its "
        f"message has no derivative (rank {MPI.COMM_WORLD.rank}); post and wait in one function"
    )


isend_p: Primitive = linear_map(
    "isend",
    result=_ticket,
    attributes=_only("dest", "tag"),
    batch_params=_batched_ticket,
    transpose=_isend_transpose,
    own_space=True,
)
irecv_p: Primitive = linear_map(
    "irecv",
    result=_ticket,
    takes_data=False,
    attributes=_irecv_attributes,
    batch_params=_batched_ticket,
    transpose=_irecv_transpose,
    own_space=True,
)
arrive_p: Primitive = linear_map(
    "arrive",
    result=lambda ticket, *, shape, dtype, **_: ShapedArray(shape, dtype),
    attributes=_only("source"),
    batch_params=_batched_result,
    transpose=_arrive_transpose,
    own_space=True,
    inactive=_posted_outside,
)
sent_p: Primitive = linear_map(
    "sent",
    result=lambda ticket, **_: None,
    attributes=_only("dest"),
    batch_params=_batched_result,
    transpose=_sent_transpose,
    own_space=True,
    inactive=_posted_outside,
)


class _Order(int):
    """A number in the order of posts. All are equal, so that requests of one kind may be carried
    by a loop, whose turns may be traced again.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Order)

    def __hash__(self) -> int:
        return 0


_posts = itertools.count()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tickets"],
    meta_fields=["kind", "peer", "tag", "comm", "packing", "order"],
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
    order: _Order

    def posted_now(self) -> Request:
        """The same message, the last of all posts so far."""
        return replace(self, order=_Order(next(_posts)))


@functools.cache
def _report_forgotten_at_exit() -> None:
    lib = library()
    lib.mpigrad_forgotten_requests.restype = ctypes.c_char_p

    def report() -> None:
        lines = lib.mpigrad_forgotten_requests().decode().splitlines()
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
    primitive, name = (isend_p, "dest") if kind == "isend" else (irecv_p, "source")
    packing, a = Packing.of(tree), carrier()
    params = {"comm": slot, name: peer, "tag": tag, "lanes": ()}
    messages = zip(packing.pack(tree), packing.in_words, strict=True)
    tickets = tuple(primitive.bind(m, a, site=call_site(w), **params)[0] for m, w in messages)
    return Request(tickets, kind, peer, tag, slot, packing, _Order(next(_posts)))


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
        The sender: a Python integer. MPI.PROC_NULL: nobody, the result is zero.
    tag
        Matched by the tag of the send, which may be `send` or `isend`.

    Returns
    -------
    The request, for `wait`, which returns what has arrived. The adjoint is a send to `source`:
    posted where the program waits for the request, and waited for here.
    """
    comm = resolve(comm)
    source = check_source(source, comm, "irecv: source")
    return post("irecv", like, source, check_tag(tag, "irecv: tag"), comm.slot)


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
    sends = _is_request(request).kind == "isend"
    primitive, name = (sent_p, "dest") if sends else (arrive_p, "source")
    params = {"comm": request.comm, name: request.peer, "tag": request.tag}
    a, packing = carrier(), request.packing
    results: list[Any] = []
    messages = zip(request.tickets, packing.messages, packing.in_words, strict=True)
    for ticket, (shape, dtype), tree in messages:
        site = call_site(tree)
        results += primitive.bind(ticket, a, shape=shape, dtype=dtype, site=site, **params)
    return None if sends else request.packing.unpack(results)


def in_order_of_posts(
    wait_for: Callable[[list[Request]], list[Any]], requests: Iterable[Request]
) -> list[Any]:
    """What `wait_for` gives for the requests in the order of their posts, in the order given."""
    given = list(map(_is_request, requests))
    positions = sorted(range(len(given)), key=lambda i: int(given[i].order))
    results = wait_for([given[i] for i in positions])
    return [
        result for _, result in sorted(zip(positions, results, strict=True), key=lambda p: p[0])
    ]


def waitall(requests: Iterable[Request]) -> list[Any]:
    """`wait` for each of the requests, in the order of their posts; results in the order given.

    The adjoint posts a message the other way for each, in reverse order.
    """
    return in_order_of_posts(lambda requests: list(map(wait, requests)), requests)
