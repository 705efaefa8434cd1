"""Wildcard receives: MPI.ANY_SOURCE and MPI.ANY_TAG.

The sender and the tag are known only when the program runs. They become an *envelope*, an integer
array by which derivatives name their partner: a tangent is received from the rank that has sent the
message, and the adjoint is sent back to that rank.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import tangent_space
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.primitive import linear_map, map_with_tangent

__all__ = ["ENVELOPE", "recv_any_p", "recv_from_p"]

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
