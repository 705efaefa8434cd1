"""Non-blocking messages: isend, irecv, wait, waitall."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.operations.carrier import carrier
from mpigrad.operations.point_to_point import check_tag
from mpigrad.operations.pytree_packing import Packing
from mpigrad.operations.requests import (
    irecv_any_p,
    irecv_p,
    isend_p,
    wait_recv_any_p,
    wait_recv_p,
    wait_send_p,
)
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import at_exit, library

__all__ = ["Request", "irecv", "isend", "post", "wait", "wait_with_status", "waitall"]


_posts = itertools.count()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens"],
    meta_fields=["kind", "peer", "tag", "comm", "packing"],
)
@dataclass(frozen=True)
class Request:
    """A pending message of `isend` or `irecv`.

    Call `wait` for it once, in the function that has posted it. It is a pytree: `scan` may carry
    it, and compiled functions may take and return it.
    """

    tokens: tuple[Any, ...]
    kind: Literal["isend", "irecv"]
    peer: int
    tag: int
    comm: int
    packing: Packing
    # The position among all posts, -1 if a compiled function or a loop has returned the request.
    # It does not belong to the pytree.
    order: int = field(default=-1, init=False)

    def as_last_post(self) -> Request:
        """Return the request with the position of the last post."""
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
                f"for the request of {line}. Its message and its adjoint may be lost. Call "
                "wait(request).\n"
            )
        sys.stderr.flush()

    at_exit(report)


def post(kind: Literal["isend", "irecv"], tree: Any, peer: int, tag: int, slot: int) -> Request:
    """Post `isend` or `irecv` in the message space of a slot, perhaps that of derivatives."""
    _report_forgotten_at_exit()
    name = "dest" if kind == "isend" else "source"
    primitive = isend_p if kind == "isend" else irecv_any_p if _is_wild(peer, tag) else irecv_p
    packing, a = Packing.of(tree, kind, "x" if kind == "isend" else "like"), carrier()
    params = {"comm": slot, name: peer, "tag": tag, "lanes": ()}
    messages = zip(packing.pack(tree), packing.descriptions, strict=True)
    tokens = tuple(primitive.bind(m, a, site=call_site(d), **params)[0] for m, d in messages)
    return Request(tokens, kind, peer, tag, slot, packing).as_last_post()


def _is_wild(source: int, tag: int) -> bool:
    return source == MPI.ANY_SOURCE or tag == MPI.ANY_TAG


def isend(x: Any, dest: int, tag: int = 0, comm: Communicator | None = None) -> Request:
    """Begin to send `x` to the rank `dest`, without waiting.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype. One message is sent for each dtype. It is copied.
    dest
        The receiver: a Python integer. With MPI.PROC_NULL nothing is sent.
    tag
        The tag, an integer, which the receive (`recv` or `irecv`) matches.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Request
        The request, for `wait`. The adjoint is a receive from `dest`: it is posted at the `wait` of
        the program, and waited for here.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> rank = mg.default_communicator().rank
    >>> request = mg.isend(jnp.arange(3.0), dest=rank)
    >>> mg.recv(jnp.zeros(3), source=rank)
    Array([0., 1., 2.], dtype=float32)
    >>> mg.wait(request)
    """
    comm = resolve(comm)
    dest = check_rank(dest, comm, "isend: dest", null=True)
    return post("isend", x, dest, check_tag(tag, "isend: tag"), comm.slot)


def irecv(like: Any, source: int, tag: int = 0, comm: Communicator | None = None) -> Request:
    """Begin to receive the values that the rank `source` sends, without waiting.

    Parameters
    ----------
    like
        Array or pytree of arrays with the shapes and dtypes of the message. Its values are not used
        and may be constants.
    source
        The sender: a Python integer, or MPI.ANY_SOURCE. With MPI.PROC_NULL nothing is received, and
        the result is zero.
    tag
        The tag of the send (`send` or `isend`). MPI.ANY_TAG matches every tag. If the tag or the
        source is a wildcard, all arrays must have the same dtype.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Request
        The request, for `wait` or `wait_with_status`, which return the received values. The adjoint
        is a send to the rank that has sent: it is posted at the `wait` of the program, and waited
        for here.

    Notes
    -----
    The tangent of a message from MPI.ANY_SOURCE is received by `wait`, because its sender is not
    known before. In forward mode, `send` of a long message waits until then, and `isend` does not.
    Between post and wait, do not receive another derivative from the same rank with the same tag,
    and do not post its receive.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> rank = mg.default_communicator().rank
    >>> request = mg.irecv(jnp.zeros(3), source=rank)
    >>> mg.send(jnp.arange(3.0), dest=rank)
    >>> mg.wait(request)
    Array([0., 1., 2.], dtype=float32)
    """
    comm = resolve(comm)
    if source != MPI.ANY_SOURCE:
        source = check_rank(source, comm, "irecv: source", null=True)
    if tag != MPI.ANY_TAG:
        tag = check_tag(tag, "irecv: tag")
    if source == MPI.PROC_NULL:
        tag = max(tag, 0)
    elif _is_wild(source, tag):
        dtypes = [dtype for _, dtype in Packing.of(like, "irecv", "like").messages]
        if len(dtypes) != 1:
            raise ValueError(
                "irecv: with MPI.ANY_SOURCE or MPI.ANY_TAG all arrays of like must have one dtype, "
                f"got {', '.join(map(str, dtypes)) or 'no arrays'} on rank {comm.rank}. Receive "
                "them by recv_with_status, or name source and tag."
            )
    return post("irecv", like, source, tag, comm.slot)


def _check_request(request: Any, operation: str = "wait") -> Request:
    if not isinstance(request, Request):
        raise TypeError(
            f"{operation}: expected a request of isend or irecv, got {type(request).__name__}. "
            "Give the value that isend or irecv returned."
        )
    return request


def wait(request: Request) -> Any:
    """Wait until the message of a request has been sent or has arrived.

    Parameters
    ----------
    request
        A request of `isend` or `irecv` that has not been waited for. The function that is
        differentiated, or mapped by `vmap`, must contain both its post and its wait. In a function
        that is differentiated, wait for messages between the same ranks with the same tag in the
        order of their posts.

    Returns
    -------
    The received values for `irecv`, None for `isend`. The adjoint is the post of a message in the
    other direction: `isend` of the cotangent for `irecv`, `irecv` of it for `isend`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> rank = mg.default_communicator().rank
    >>> leaving = mg.isend(jnp.ones(2), dest=rank)
    >>> arriving = mg.irecv(jnp.zeros(2), source=rank)
    >>> mg.wait(leaving)
    >>> mg.wait(arriving)
    Array([1., 1.], dtype=float32)
    """
    return _complete(_check_request(request)).value


def wait_with_status(request: Request) -> tuple[Any, Any, Any]:
    """Wait until the message of an `irecv` has arrived, and return also the sender and the tag.

    Parameters
    ----------
    request
        A request of `irecv`, as for `wait`.

    Returns
    -------
    value
        The received values, in the structure and shapes of `like`.
    source, tag
        Integer scalars (int32). The adjoint is a send to this rank with this tag.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> from mpi4py import MPI
    >>> rank = mg.default_communicator().rank
    >>> request = mg.irecv(jnp.zeros(2), MPI.ANY_SOURCE, MPI.ANY_TAG)
    >>> mg.send(jnp.ones(2), dest=rank, tag=5)
    >>> value, source, tag = mg.wait_with_status(request)
    >>> int(source) == rank, int(tag)
    (True, 5)
    """
    if _check_request(request, "wait_with_status").kind == "isend":
        raise TypeError(
            "wait_with_status: expected a request of irecv, got a request of isend. Call "
            "wait(request) for it."
        )
    value, envelope = _complete(request)
    if envelope is not None:
        return value, envelope[0], envelope[1]
    tag = request.tag if request.peer != MPI.PROC_NULL else MPI.ANY_TAG
    return value, jnp.int32(request.peer), jnp.int32(tag)


class _Completion(NamedTuple):
    """The received values, and the envelope (sender, tag) of a wildcard receive."""

    value: Any
    envelope: Any


def _complete(request: Request) -> _Completion:
    sends, wild = request.kind == "isend", _is_wild(request.peer, request.tag)
    primitive = wait_send_p if sends else wait_recv_any_p if wild else wait_recv_p
    params: dict[str, Any] = {"comm": request.comm, "dest" if sends else "source": request.peer}
    if not wild:
        params["tag"] = request.tag
    a, packing = carrier(), request.packing
    results: list[Any] = []
    messages = zip(request.tokens, packing.messages, packing.descriptions, strict=True)
    for token, (shape, dtype), tree in messages:
        site = call_site(tree)
        results += primitive.bind(token, a, shape=shape, dtype=dtype, site=site, **params)
    envelope = results.pop() if wild else None
    return _Completion(None if sends else packing.unpack(results), envelope)


def in_order_of_posts(
    wait_for: Callable[[list[Request]], list[Any]], requests: Iterable[Request]
) -> list[Any]:
    """Wait for requests in the order of their posts, and return the results in their own order."""
    checked = [_check_request(request, "waitall") for request in requests]
    positions = list(range(len(checked)))
    if all(request.order >= 0 for request in checked):
        positions.sort(key=lambda i: checked[i].order)
    results = wait_for([checked[i] for i in positions])
    return [
        result for _, result in sorted(zip(positions, results, strict=True), key=lambda p: p[0])
    ]


def waitall(requests: Iterable[Request]) -> list[Any]:
    """Wait for several requests in the order of their posts.

    If a compiled function or a loop has returned one of the requests, the order of posts is not
    known, and the requests are waited for in the order in which they are given.

    Parameters
    ----------
    requests
        Requests of `isend` and `irecv`, as for `wait`.

    Returns
    -------
    list
        The result of `wait` for each request, in the order in which they are given. The adjoint
        posts a message in the other direction for each, in reverse order.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> rank = mg.default_communicator().rank
    >>> requests = [mg.irecv(jnp.zeros(2), source=rank), mg.isend(jnp.ones(2), dest=rank)]
    >>> mg.waitall(requests)
    [Array([1., 1.], dtype=float32), None]
    """
    return in_order_of_posts(lambda requests: list(map(wait, requests)), requests)
