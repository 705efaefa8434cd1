"""Receives from whoever sends: MPI.ANY_SOURCE and MPI.ANY_TAG.

The sender and the tag are known only when the program runs. They become an *envelope*, an integer
array (rank, tag), by which derivatives name their partner: tangents are received from the rank
that has sent, and adjoints are sent back to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.communicator import derivative_slot
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching
from mpigrad.operations.activity import CARRIER, nought
from mpigrad.operations.factory import (
    check_count,
    is_differentiable,
    register_target,
    run_eagerly,
)

__all__ = ["recv_any_p", "recv_from_p"]

_ENVELOPE = ShapedArray((2,), np.dtype("int32"))


def _in_front(x: Any, d: int | None, n: int) -> Any:
    """The batch in front; a message is sent for each member, since partners may be batched."""
    return jnp.broadcast_to(x, (n, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)


def _size(args: Any, dims: Any) -> int:
    return next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)


def _total(a: Any, d: int | None) -> Any:
    return a if d is None else jnp.sum(a)


# ---- messages to and from the rank of an envelope: linear in x, transposes of each other ----


def _partner_map(name: str, operands: int, transpose: Callable[..., Any], returns: bool) -> Any:
    """The primitive (envelope, x, carrier) -> [y] or []; y has the type of x."""
    primitive = Primitive(f"mpigrad_{name}")

    def shape_rule(envelope: Any, x: Any, a: Any, **params: Any) -> list[ShapedArray]:
        check_count(name, x.shape, x.dtype)
        return [ShapedArray(x.shape, x.dtype)] if returns else []

    compat.make_effectful(primitive, shape_rule)
    run_eagerly(primitive)
    target = register_target(f"mpigrad_{name}")
    compat.register_lowering(primitive, compat.lowering(target, operands))

    def tangent(aval: Any, params: dict[str, Any]) -> Callable[..., Any]:
        params = {**params, "comm": derivative_slot(params["comm"])}

        def apply(envelope: Any, a: Any, tx: Any, ta: Any) -> Any:
            if type(tx) is ad.Zero:
                tx = nought(ta, aval)
            return primitive.bind(envelope, tx, a, **params)

        return apply

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        envelope, x, a = primals
        y = primitive.bind(*primals, **params)
        if not is_differentiable(x.dtype):
            return y, [ad.Zero(compat.tangent_aval(v)) for v in y]
        link = a + nought(x, CARRIER)
        return y, tangent(jax.typeof(x), params)(envelope, link, *tangents[1:])

    def linearize(is_vjp: Any, nonzeros: Any, envelope: Any, x: Any, a: Any, **params: Any) -> Any:
        y = primitive.bind(envelope, x, a, **params)
        if not is_differentiable(x.dtype):
            zeros = [ad.Zero(compat.tangent_aval(v)) for v in y]
            return y, [False] * len(y), [], lambda residuals, *tangents: zeros
        link = a + nought(x, CARRIER)
        apply = tangent(jax.typeof(x), params)
        return (
            y,
            [True] * len(y),
            [envelope, link],
            lambda residuals, te, tx, ta: apply(*residuals, tx, ta),
        )

    def transpose_rule(cts: Any, envelope: Any, x: Any, a: Any, **params: Any) -> list[Any]:
        aval = x.aval if ad.is_undefined_primal(x) else jax.typeof(x)
        ct = ad.instantiate_zeros(cts[0]) if cts else None
        params = {**params, "site": -abs(params["site"])}
        return [None, transpose(ct, envelope, aval, a, **params), None]

    def batch(args: Any, dims: Any, **params: Any) -> Any:
        n = _size(args, dims)
        envelope, x, a = args
        envelope = envelope if dims[0] is None else jnp.moveaxis(envelope, dims[0], 0)[0]
        x = _in_front(x, dims[1], n)
        y = primitive.bind(envelope, x, _total(a, dims[2]), **params)
        return y, [0] * len(y)

    ad.primitive_jvps[primitive] = jvp
    compat.set_linearization(primitive, linearize)
    compat.always_stage(primitive)
    ad.primitive_transposes[primitive] = transpose_rule
    batching.primitive_batchers[primitive] = batch
    return primitive


def _recv_from_transpose(ct: Any, envelope: Any, x: Any, a: Any, **where: int) -> Any:
    send_to_p.bind(envelope, ct, a, **where)
    return jnp.zeros(x.shape, x.dtype)


def _send_to_transpose(ct: None, envelope: Any, x: Any, a: Any, **where: int) -> Any:
    return recv_from_p.bind(envelope, jnp.zeros(x.shape, x.dtype), a, **where)[0]


recv_from_p = _partner_map("recv_from", 1, _recv_from_transpose, returns=True)
send_to_p = _partner_map("send_to", 2, _send_to_transpose, returns=False)


# ---- the receive itself: (like, carrier) -> [y, envelope] ----

recv_any_p = Primitive("mpigrad_recv_any")


def _shapes(x: Any, a: Any, **params: Any) -> list[ShapedArray]:
    check_count("recv", x.shape, x.dtype)
    return [ShapedArray(x.shape, x.dtype), _ENVELOPE]


def _tangent(
    aval: Any,
    envelope: Any,
    a: Any,
    tx: Any,
    ta: Any,
    *,
    source: int,
    tag: int,
    comm: int,
    **p: Any,
) -> Any:
    tx = nought(ta, aval) if type(tx) is ad.Zero else tx
    return recv_from_p.bind(envelope, tx, a, comm=derivative_slot(comm), **p)[0]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    x, a = primals
    y, envelope = recv_any_p.bind(x, a, **params)
    no_tangent = ad.Zero(compat.tangent_aval(envelope))
    if not is_differentiable(x.dtype):
        return [y, envelope], [ad.Zero(compat.tangent_aval(y)), no_tangent]
    link = a + nought(x, CARRIER)
    ty = _tangent(jax.typeof(x), envelope, link, *tangents, **params)
    return [y, envelope], [ty, no_tangent]


def _linearize(is_vjp: Any, nonzeros: Any, x: Any, a: Any, **params: Any) -> Any:
    y, envelope = recv_any_p.bind(x, a, **params)
    no_tangent = ad.Zero(compat.tangent_aval(envelope))
    aval = jax.typeof(x)
    if not is_differentiable(x.dtype):
        zero = ad.Zero(compat.tangent_aval(y))
        return [y, envelope], [False, False], [], lambda residuals, tx, ta: [zero, no_tangent]
    residuals = [envelope, a + nought(x, CARRIER)]

    def linear(residuals: Any, tx: Any, ta: Any) -> Any:
        envelope, link = residuals
        return [_tangent(aval, envelope, link, tx, ta, **params), no_tangent]

    return [y, envelope], [True, False], residuals, linear


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    x = _in_front(args[0], dims[0], _size(args, dims))
    # A batch is one message: its envelope has no batch axis.
    return recv_any_p.bind(x, _total(args[1], dims[1]), **params), [0, None]


compat.make_effectful(recv_any_p, _shapes)
run_eagerly(recv_any_p)
compat.register_lowering(recv_any_p, compat.lowering(register_target("mpigrad_recv_any"), 0))
ad.primitive_jvps[recv_any_p] = _jvp
compat.set_linearization(recv_any_p, _linearize)
compat.always_stage(recv_any_p)
batching.primitive_batchers[recv_any_p] = _batch
