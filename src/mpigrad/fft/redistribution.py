"""Redistribution: an array divided along one axis becomes divided along another."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpigrad.communicator import Communicator, derivative_slot
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.carrier import carrier
from mpigrad.operations.primitive import linear_map
from mpigrad.runtime.call_sites import call_site

__all__ = ["redistribute"]


def _result(
    x: Any, *, gather: int, split: int, own: int, to: Any, order: tuple[int, ...], **rest: Any
) -> ShapedArray:
    batch = x.ndim - len(order)
    shape = list(x.shape[batch:])
    shape[gather] = sum(rest["from"])
    shape[split] = own
    return ShapedArray((*x.shape[:batch], *(shape[i] for i in order)), x.dtype)


def _transpose(
    ct: Any, x: Any, a: Any, *, gather: int, split: int, own: int, to: Any, order: Any, **rest: Any
) -> Any:
    axes, sizes = len(order), rest.pop("from")
    back = tuple(int(i) for i in np.argsort(order))
    return redistribute_p.bind(
        ct,
        a,
        gather=order.index(split),
        split=order.index(gather),
        own=x.shape[x.ndim - axes + gather],
        to=sizes,
        order=back,
        **{**rest, "from": to},
    )[0]


def _attributes(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "own"}


redistribute_p: Primitive = linear_map(
    "redistribute", result=_result, transpose=_transpose, attributes=_attributes
)


def redistribute(
    x: Any,
    comm: Communicator,
    gather: int,
    sizes: tuple[int, ...],
    split: int,
    parts: tuple[int, ...],
    order: tuple[int, ...],
) -> Any:
    """Make the axis `gather` of `x` whole and divide the axis `split`, in one exchange.

    Parameters
    ----------
    x
        This rank's block. Axes before the last `len(order)` are a batch.
    comm
        The ranks whose blocks together are whole along `gather`, in the order of their blocks.
    gather, sizes
        The axis that becomes whole, without the batch, and its entries on each rank.
    split, parts
        The axis that becomes divided, and its entries on each rank afterwards.
    order
        The order of the axes in the result, as in `transpose`.

    Returns
    -------
    This rank's block of the other division. The adjoint is the exchange in the other direction.
    """
    # The messages of other ranks never meet receives from any source, as those of halos.
    space = derivative_slot(comm.slot)
    return redistribute_p.bind(
        x,
        carrier(),
        comm=space,
        site=call_site(""),
        gather=gather,
        split=split,
        own=parts[comm.rank],
        to=parts,
        order=order,
        **{"from": sizes},
    )[0]
