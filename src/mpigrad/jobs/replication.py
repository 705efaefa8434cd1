"""Exchange between replicated arrays and arrays that differ between ranks.

`collect_rows` gathers one row from each rank, so that all ranks have all rows. Its transpose
`take_row` gives each rank its row of a replicated array. The two are transposes of each other if a
replicated array counts as *one* array: its cotangent is replicated, too, and counts once. If the
cotangent differs between ranks (a loss that is seeded on rank 0 only), `take_row` takes the mean
over ranks, so that the sum of the gradients over ranks is still right. The mean of equal numbers is
that number, bit for bit.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from mpigrad.communicator import Communicator
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray, mlir
from mpigrad.operations.carrier import carrier
from mpigrad.operations.collectives import alltoall_p
from mpigrad.operations.primitive import linear_map
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import NO_REDUCTION

__all__ = ["collect_rows", "take_row"]


def _mean_of_own(x: Any, a: Any, **where: int) -> list[Any]:
    versions = alltoall_p.bind(x, a, **where)[0]
    first = versions[0]
    others = jnp.where(versions == first, 0, versions - first)
    return [first + jnp.sum(others, 0) / len(versions)]


collect_p: Primitive = linear_map(
    "jobs_collect",
    target="mpigrad_allgather",
    result=lambda x, *, size, **_: ShapedArray((size, *x.shape), x.dtype),
    attributes=lambda avals, p: {"comm": p["comm"], "site": p["site"], "op": NO_REDUCTION},
    batch_axes=(0, 1),
    transpose=lambda ct, x, a, *, size, **where: take_p.bind(ct, a, **where)[0],
)
take_p: Primitive = linear_map(
    "jobs_take",
    target="mpigrad_alltoall",
    result=lambda x, **_: ShapedArray(x.shape[1:], x.dtype),
    batch_axes=(1, 0),
    transpose=lambda ct, x, a, **where: collect_p.bind(ct, a, size=x.shape[0], **where)[0],
)
compat.register_lowering(take_p, mlir.lower_fun(_mean_of_own, multiple_results=True))


def collect_rows(x: Any, comm: Communicator) -> Any:
    """Gather the rows `x` of all ranks on every rank, as an array of shape (ranks, *x.shape)."""
    return collect_p.bind(x, carrier(), comm=comm.slot, site=call_site(), size=comm.size)[0]


def take_row(x: Any, comm: Communicator) -> Any:
    """Return this rank's row of `x`, shape (ranks, ...), averaged over the ranks' versions."""
    return take_p.bind(x, carrier(), comm=comm.slot, site=call_site())[0]
