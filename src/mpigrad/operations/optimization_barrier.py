"""A place in the order of messages for a computation: before one message, after another."""

from __future__ import annotations

from typing import Any

import jax

from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.carrier import carrier
from mpigrad.operations.primitive import linear_map
from mpigrad.runtime.call_sites import call_site

__all__ = ["keep_in_order"]


def _transpose(ct: Any, x: Any, a: Any, **params: Any) -> Any:
    return in_order_p.bind(ct, a, **params)[0]


in_order_p: Primitive = linear_map(
    "in_order",
    result=lambda x, **_: ShapedArray(x.shape, x.dtype),
    in_place=True,
    transpose=_transpose,
)


def keep_in_order(tree: Any) -> Any:
    """Return the same values, computed after the messages before and before the messages after.

    Compiled programs keep the messages in order, and compute in any order that their data allow.
    The operand is computed before the messages that follow, the results after the messages that
    precede. The derivative keeps the reverse order. If the operand is not needed again, no copy is
    made.

    Parameters
    ----------
    tree
        Array or pytree of arrays.
    """
    a, site = carrier(), call_site()
    return jax.tree.map(lambda x: in_order_p.bind(x, a, site=site)[0], tree)
