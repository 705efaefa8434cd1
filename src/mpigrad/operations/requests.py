"""The primitives of non-blocking messages, and of wildcard receives: a post and a wait."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import tangent_space
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.primitive import is_differentiable, linear_map, map_with_tangent

__all__ = [
    "ENVELOPE",
    "irecv_any_p",
    "irecv_p",
    "isend_p",
    "recv_any_p",
    "recv_from_p",
    "wait_recv_any_p",
    "wait_recv_p",
    "wait_send_p",
]

# ---- Wildcard receives: MPI.ANY_SOURCE and MPI.ANY_TAG ----
#
# The sender and the tag are known only when the program runs. They become an *envelope*, an
# integer array by which derivatives name their partner: a tangent is received from the rank that
# has sent the message, and the adjoint is sent back to that rank.


ENVELOPE = ShapedArray((2,), np.dtype("int32"))  # the sender and the tag


def _recv_from_transpose(ct: Any, envelope: Any, x: Any, a: Any, **where: int) -> Any:
    send_to_p.bind(envelope, ct, a, **where)
    return jnp.zeros(x.shape, x.dtype)


def _send_to_transpose(ct: None, envelope: Any, x: Any, a: Any, **where: int) -> Any:
    return recv_from_p.bind(envelope, jnp.zeros(x.shape, x.dtype), a, **where)[0]


recv_from_p: Primitive = linear_map(
    "recv_from",
    n_nondiff=1,
    n_inputs=1,
    result=lambda envelope, x, **_: ShapedArray(x.shape, x.dtype),
    transpose=_recv_from_transpose,
    separate_tags=True,
)
send_to_p: Primitive = linear_map(
    "send_to",
    n_nondiff=1,
    result=lambda envelope, x, **_: None,
    transpose=_send_to_transpose,
    separate_tags=True,
)


def _tangent(
    residuals: Any, txs: Any, a: Any, *, source: int, tag: int, comm: int, site: int
) -> list[Any]:
    return recv_from_p.bind(*residuals, *txs, a, comm=tangent_space(comm), site=site)


recv_any_p: Primitive = map_with_tangent(
    "recv_any",
    n_inputs=0,
    result=lambda x, **_: [ShapedArray(x.shape, x.dtype), ENVELOPE],
    batched_results=1,  # a batch is one message
    residuals=lambda x, a, results, **_: results[1:],
    tangent=_tangent,
)


# ---- The primitives of non-blocking messages: a post and a wait ----
#
# A post returns a *request token*, a number that stands for the pending message, and the wait
# takes it. To JAX the token of a differentiable message is a linear function of the message, and
# the received value is a linear function of the token. So the token of the tangent goes to the
# wait of the tangent, and in the adjoint from the wait back to the post, on whatever way the
# program carries the request: through loops, branches and compiled functions. The adjoint of a
# wait is a post, and the adjoint of a post is a wait.


def _token(x: Any, *, lanes: tuple[int, ...], **_: Any) -> ShapedArray:
    """Return the type of a token; a batch has one token, repeated for each member (`lanes`)."""
    return ShapedArray(lanes, np.dtype("float32" if is_differentiable(x.dtype) else "int32"))


def _batched_token(params: dict[str, Any], n: int) -> dict[str, Any]:
    if n == 0:
        raise ValueError(
            "isend, irecv: under vmap the batch must have at least one member, got an empty batch, "
            "for which nothing is posted. Send the empty array without vmap, or by sendrecv."
        )
    return {**params, "lanes": (n, *params["lanes"])}


def _batched_result(params: dict[str, Any], n: int) -> dict[str, Any]:
    return {**params, "shape": (n, *params["shape"])}


def _only(*names: str) -> Any:
    """Return the rule that gives a handler these parameters."""
    return lambda avals, params: {name: params[name] for name in ("comm", "site", *names)}


def _irecv_attributes(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    x = avals[0]
    size = {"bytes": math.prod(x.shape) * x.dtype.itemsize, "element_bytes": x.dtype.itemsize}
    return {**_only("source", "tag")(avals, params), **size}


def _isend_transpose(ct: Any, x: Any, a: Any, *, dest: int, lanes: Any, **p: Any) -> Any:
    return wait_recv_p.bind(ct, a, source=dest, shape=tuple(x.shape), dtype=np.dtype(x.dtype), **p)[
        0
    ]


def _arrive_transpose(
    ct: Any, x: Any, a: Any, *, source: int, shape: Any, dtype: Any, **p: Any
) -> Any:
    return isend_p.bind(ct, a, dest=source, lanes=tuple(x.shape), **p)[0]


def _irecv_transpose(ct: Any, x: Any, a: Any, *, source: int, lanes: Any, **p: Any) -> Any:
    wait_send_p.bind(ct, a, dest=source, shape=tuple(x.shape), dtype=np.dtype(x.dtype), **p)
    return jnp.zeros(x.shape, x.dtype)  # only the shape of `like` is used


def _sent_transpose(
    ct: None, x: Any, a: Any, *, dest: int, shape: Any, dtype: Any, **p: Any
) -> Any:
    return irecv_p.bind(jnp.zeros(shape, dtype), a, source=dest, lanes=tuple(x.shape), **p)[0]


def _arrived(*tokens: Any, shape: Any, dtype: Any, **_: Any) -> ShapedArray:
    return ShapedArray(shape, dtype)


def _posted_outside(ta: Any, token: Any) -> Any:
    raise ValueError(
        "wait: the request must be posted inside the function that is differentiated, but was "
        f"posted outside on rank {MPI.COMM_WORLD.rank}, so its message is not differentiated. Call "
        "post and wait in one function."
    )


isend_p: Primitive = linear_map(
    "isend",
    result=_token,
    attributes=_only("dest", "tag"),
    batch_params=_batched_token,
    transpose=_isend_transpose,
    separate_tags=True,
)
irecv_p: Primitive = linear_map(
    "irecv",
    result=_token,
    n_inputs=0,
    attributes=_irecv_attributes,
    batch_params=_batched_token,
    transpose=_irecv_transpose,
    separate_tags=True,
)
wait_recv_p: Primitive = linear_map(
    "arrive",
    result=_arrived,
    attributes=_only("source"),
    batch_params=_batched_result,
    transpose=_arrive_transpose,
    separate_tags=True,
    inactive=_posted_outside,
)
wait_send_p: Primitive = linear_map(
    "sent",
    result=lambda token, **_: None,
    attributes=_only("dest"),
    batch_params=_batched_result,
    transpose=_sent_transpose,
    separate_tags=True,
    inactive=_posted_outside,
)


# ---- wildcard receives: the wait returns the sender, in an envelope ----
#
# A tangent cannot be posted before its sender is known: it is received at the wait of the program.
# The adjoint is posted at the wait, and waited for at the post of the receive.


def _open_transpose(ct: Any, x: Any, a: Any, *, lanes: Any, **p: Any) -> Any:
    wait_send_to_p.bind(ct, a, shape=tuple(x.shape), dtype=np.dtype(x.dtype), **p)
    return jnp.zeros(x.shape, x.dtype)


def _sent_to_transpose(ct: None, x: Any, a: Any, *, shape: Any, dtype: Any, **p: Any) -> Any:
    return open_p.bind(jnp.zeros(shape, dtype), a, lanes=tuple(x.shape), **p)[0]


def _arrive_from_transpose(
    ct: Any, envelope: Any, x: Any, a: Any, *, shape: Any, dtype: Any, **p: Any
) -> Any:
    return isend_to_p.bind(envelope, ct, a, lanes=tuple(x.shape), **p)[0]


def _isend_to_transpose(ct: Any, envelope: Any, x: Any, a: Any, *, lanes: Any, **p: Any) -> Any:
    p.update(shape=tuple(x.shape), dtype=np.dtype(x.dtype))
    return wait_recv_from_p.bind(envelope, ct, a, **p)[0]


open_p: Primitive = linear_map(
    "open",
    result=_token,
    n_inputs=0,
    attributes=_only(),
    batch_params=_batched_token,
    transpose=_open_transpose,
    separate_tags=True,
)
wait_send_to_p: Primitive = linear_map(
    "sent_to",
    target="mpigrad_sent",
    result=lambda token, **_: None,
    attributes=lambda avals, params: {**_only()(avals, params), "dest": -1},
    batch_params=_batched_result,
    transpose=_sent_to_transpose,
    separate_tags=True,
    inactive=_posted_outside,
)
wait_recv_from_p: Primitive = linear_map(
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
    result=lambda envelope, x, **params: _token(x, **params),
    attributes=_only(),
    batch_params=_batched_token,
    transpose=_isend_to_transpose,
    separate_tags=True,
)


def _open_tangent(
    residuals: Any, txs: Any, a: Any, *, source: int, tag: int, comm: int, **p: Any
) -> list[Any]:
    return open_p.bind(*txs, a, comm=tangent_space(comm), **p)


def _wait_recv_any_tangent(
    residuals: Any, txs: Any, a: Any, *, source: int, comm: int, **p: Any
) -> list[Any]:
    return wait_recv_from_p.bind(*residuals, *txs, a, comm=tangent_space(comm), **p)


irecv_any_p: Primitive = map_with_tangent(
    "irecv_any",
    target="mpigrad_irecv",
    result=_token,
    n_inputs=0,
    attributes=_irecv_attributes,
    batch_params=_batched_token,
    residuals=lambda *_, **params: (),
    tangent=_open_tangent,
)
wait_recv_any_p: Primitive = map_with_tangent(
    "arrive_any",
    result=lambda *xs, **params: [_arrived(**params), ENVELOPE],
    batched_results=1,  # a batch is one message
    attributes=_only("source"),
    batch_params=_batched_result,
    residuals=lambda token, a, results, **_: results[1:],
    tangent=_wait_recv_any_tangent,
    inactive=_posted_outside,
)
