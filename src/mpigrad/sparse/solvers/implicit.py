"""Primitives that are computed by iterations and differentiated implicitly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.operations import _jax_compat as compat
from mpigrad.operations import _jax_repairs as repairs
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir

__all__ = ["implicit_primitive"]


def implicit_primitive(
    name: str,
    *,
    shapes: Callable[..., Sequence[ShapedArray]],
    run: Callable[..., Any],
    differentiate: Callable[..., tuple[list[Any], Any, Callable[..., list[Any]]]],
) -> Primitive:
    """Make a primitive (..., carrier) -> x, info, ... with messages, and jaxprs as parameters.

    Parameters
    ----------
    shapes
        (avals, **params) -> avals of the results.
    run
        (*operands, **params) -> the results: the computation.
    differentiate
        (operands, params) -> the results, a pytree of residuals, and the tangent map
        (residuals, tangents) -> tangents of the results, linear. Info is not differentiated.
    """
    primitive = Primitive(f"mpigrad_{name}")

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        results, residuals, tangent = differentiate(primals, params)
        return results, tangent(residuals, tangents)

    def linearize(is_vjp: Any, nonzeros: Any, *primals: Any, **params: Any) -> Any:
        results, residuals, tangent = differentiate(primals, params)
        leaves, structure = jax.tree.flatten(residuals)

        def linear(leaves: Any, *tangents: Any) -> Any:
            return tangent(jax.tree.unflatten(structure, leaves), tangents)

        return results, [i != 1 for i in range(len(results))], leaves, linear

    def batch(args: Any, dims: Any, **params: Any) -> Any:
        # One after the other, for the whole batch: another rank's operands may be batched.
        n = next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)
        mapped = [i for i, d in enumerate(dims[:-1]) if d is not None]
        a = args[-1] if dims[-1] is None else jnp.sum(args[-1])

        def one(member: Any) -> Any:
            operands = [*args[:-1], a]
            for i, value in zip(mapped, member[1], strict=True):
                operands[i] = value
            return primitive.bind(*operands, **params)

        front = [jnp.moveaxis(args[i], dims[i], 0) for i in mapped]
        results = jax.lax.map(one, (jnp.arange(n), front))
        return results, [0] * len(results)

    def eagerly(*operands: Any, **params: Any) -> Any:
        # Compiled again by each call outside jit: the functions may close over anything.
        return jax.jit(lambda *operands: primitive.bind(*operands, **params))(*operands)

    compat.make_effectful(primitive, shapes)
    primitive.def_impl(eagerly)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    ad.primitive_jvps[primitive] = jvp
    compat.set_linearization(primitive, linearize)
    repairs.always_stage(primitive)
    batching.primitive_batchers[primitive] = batch
    return primitive
