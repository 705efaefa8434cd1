"""The primitives of messages that are posted first and waited for later.

A post returns a *ticket*, a number that stands for the pending message, and the wait takes it. To
JAX the ticket of a message with a derivative is a linear function of the message, and what arrives
is a linear function of the ticket; so the tangent's ticket goes to the tangent's wait, and from
the wait back to the post in the adjoint, on whatever way the program carries the request: through
loops, branches and compiled functions. The adjoint of a wait is a post, and of a post a wait.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import tangent_space
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.any_source import ENVELOPE
from mpigrad.operations.primitive import is_differentiable, linear_map, map_with_tangent

__all__ = ["arrive_any_p", "arrive_p", "irecv_any_p", "irecv_p", "isend_p", "sent_p"]


def _ticket(x: Any, *, lanes: tuple[int, ...], **_: Any) -> ShapedArray:
    """Of a batch there is one message and one ticket, repeated for each member (`lanes`)."""
    return ShapedArray(lanes, np.dtype("float32" if is_differentiable(x.dtype) else "int32"))


def _batched_ticket(params: dict[str, Any], n: int) -> dict[str, Any]:
    if n == 0:
        raise ValueError(
            "isend and irecv under vmap of an empty batch: there is no request to wait for; send "
            "an empty array without vmap, or by sendrecv"
        )
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


def _arrived(*tickets: Any, shape: Any, dtype: Any, **_: Any) -> ShapedArray:
    return ShapedArray(shape, dtype)


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
    separate_tags=True,
)
irecv_p: Primitive = linear_map(
    "irecv",
    result=_ticket,
    n_inputs=0,
    attributes=_irecv_attributes,
    batch_params=_batched_ticket,
    transpose=_irecv_transpose,
    separate_tags=True,
)
arrive_p: Primitive = linear_map(
    "arrive",
    result=_arrived,
    attributes=_only("source"),
    batch_params=_batched_result,
    transpose=_arrive_transpose,
    separate_tags=True,
    inactive=_posted_outside,
)
sent_p: Primitive = linear_map(
    "sent",
    result=lambda ticket, **_: None,
    attributes=_only("dest"),
    batch_params=_batched_result,
    transpose=_sent_transpose,
    separate_tags=True,
    inactive=_posted_outside,
)


# ---- from anyone: the wait tells who it was, in an envelope ----
#
# A tangent cannot be posted before anybody knows from whom it comes: it is received where the
# program waits. The adjoint is posted there, and waited for where the receive was posted.


def _open_transpose(ct: Any, x: Any, a: Any, *, lanes: Any, **p: Any) -> Any:
    sent_to_p.bind(ct, a, shape=tuple(x.shape), dtype=np.dtype(x.dtype), **p)
    return jnp.zeros(x.shape, x.dtype)


def _sent_to_transpose(ct: None, x: Any, a: Any, *, shape: Any, dtype: Any, **p: Any) -> Any:
    return open_p.bind(jnp.zeros(shape, dtype), a, lanes=tuple(x.shape), **p)[0]


def _arrive_from_transpose(
    ct: Any, envelope: Any, x: Any, a: Any, *, shape: Any, dtype: Any, **p: Any
) -> Any:
    return isend_to_p.bind(envelope, ct, a, lanes=tuple(x.shape), **p)[0]


def _isend_to_transpose(ct: Any, envelope: Any, x: Any, a: Any, *, lanes: Any, **p: Any) -> Any:
    p.update(shape=tuple(x.shape), dtype=np.dtype(x.dtype))
    return arrive_from_p.bind(envelope, ct, a, **p)[0]


open_p: Primitive = linear_map(
    "open",
    result=_ticket,
    n_inputs=0,
    attributes=_only(),
    batch_params=_batched_ticket,
    transpose=_open_transpose,
    separate_tags=True,
)
sent_to_p: Primitive = linear_map(
    "sent_to",
    target="mpigrad_sent",
    result=lambda ticket, **_: None,
    attributes=lambda avals, params: {**_only()(avals, params), "dest": -1},
    batch_params=_batched_result,
    transpose=_sent_to_transpose,
    separate_tags=True,
    inactive=_posted_outside,
)
arrive_from_p: Primitive = linear_map(
    "arrive_from",
    n_nondiff=1,
    result=_arrived,
    attributes=_only(),
    batch_params=_batched_result,
    transpose=_arrive_from_transpose,
    separate_tags=True,
    inactive=_posted_outside,
)
isend_to_p: Primitive = linear_map(
    "isend_to",
    n_nondiff=1,
    result=lambda envelope, x, **params: _ticket(x, **params),
    attributes=_only(),
    batch_params=_batched_ticket,
    transpose=_isend_to_transpose,
    separate_tags=True,
)


def _opened(
    known: Any, txs: Any, a: Any, *, source: int, tag: int, comm: int, **p: Any
) -> list[Any]:
    return open_p.bind(*txs, a, comm=tangent_space(comm), **p)


def _arrived_tangent(
    known: Any, txs: Any, a: Any, *, source: int, comm: int, **p: Any
) -> list[Any]:
    return arrive_from_p.bind(*known, *txs, a, comm=tangent_space(comm), **p)


irecv_any_p: Primitive = map_with_tangent(
    "irecv_any",
    target="mpigrad_irecv",
    result=_ticket,
    n_inputs=0,
    attributes=_irecv_attributes,
    batch_params=_batched_ticket,
    residuals=lambda *_, **params: (),
    tangent=_opened,
)
arrive_any_p: Primitive = map_with_tangent(
    "arrive_any",
    result=lambda *xs, **params: [_arrived(**params), ENVELOPE],
    batched_results=1,  # a batch is one message
    attributes=_only("source"),
    batch_params=_batched_result,
    residuals=lambda ticket, a, results, **_: results[1:],
    tangent=_arrived_tangent,
    inactive=_posted_outside,
)
