"""One packed message to and from each neighbour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.communicator import Communicator, check_rank, derivative_slot, resolve
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.carrier import carrier
from mpigrad.operations.primitive import linear_map
from mpigrad.operations.pytree_packing import array, in_words, over_packed
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import TAG_LIMIT, words_per_element

__all__ = ["neighbor_alltoallv"]

NEIGHBOR_TAG = TAG_LIMIT + 1  # no program has it, nor one of its derivatives


def _result(x: Any, *, recvcounts: tuple[int, ...], **_: Any) -> ShapedArray:
    return ShapedArray((sum(recvcounts), *x.shape[1:]), x.dtype)


def _transpose(ct: Any, x: Any, a: Any, *, sendcounts: Any, recvcounts: Any, **params: Any) -> Any:
    return neighbor_alltoallv_p.bind(ct, a, sendcounts=recvcounts, recvcounts=sendcounts, **params)[
        0
    ]


def _attributes(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    x = avals[0]
    return {**params, "row_words": math.prod(x.shape[1:]) * words_per_element(x.dtype)}


neighbor_alltoallv_p: Primitive = linear_map(
    "neighbor_alltoallv",
    result=_result,
    attributes=_attributes,
    batch_axes=(1, 1),
    transpose=_transpose,
)


def neighbor_alltoallv(
    x: Any,
    neighbors: Sequence[int],
    sendcounts: Sequence[int],
    recvcounts: Sequence[int],
    comm: Communicator | None = None,
) -> Any:
    """Exchange rows with the neighbouring ranks, one message of each dtype each way.

    Parameters
    ----------
    x
        Array or pytree of arrays of shape (sum(sendcounts), ...): the rows for neighbors[0], then
        those for neighbors[1], and so on.
    neighbors
        Ranks, without repetition. Rank r names s if and only if s names r.
    sendcounts, recvcounts
        Rows that go to, and come from, each neighbour; no message where a count is zero.

    Returns
    -------
    Arrays of shape (sum(recvcounts), ...), packed in the same way. The adjoint is the same
    exchange with the counts exchanged.
    """
    comm = resolve(comm)
    ranks = tuple(check_rank(r, comm, "neighbor_alltoallv: neighbors") for r in neighbors)
    send, receive = tuple(int(n) for n in sendcounts), tuple(int(n) for n in recvcounts)
    if not len(ranks) == len(send) == len(receive):
        raise ValueError(
            f"neighbor_alltoallv: {len(ranks)} neighbors, {len(send)} sendcounts and "
            f"{len(receive)} recvcounts on rank {comm.rank}; give one count for each neighbour"
        )
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"neighbor_alltoallv: neighbors {ranks} name a rank twice")
    if min((*send, *receive, 0)) < 0:
        raise ValueError("neighbor_alltoallv: counts must not be negative")
    for leaf in jax.tree.leaves(x):
        shape = jnp.shape(array(leaf))
        if not shape or shape[0] != sum(send):
            raise ValueError(
                f"neighbor_alltoallv: x has shape {shape} on rank {comm.rank}; its leading axis "
                f"must have sum(sendcounts) = {sum(send)} rows"
            )
    site, a = call_site(in_words(x, 1)), carrier()

    def exchange(leaf: Any) -> Any:
        (y,) = neighbor_alltoallv_p.bind(
            leaf,
            a,
            comm=derivative_slot(comm.slot),  # out of the way of the program's wildcard receives
            site=site,
            tag=NEIGHBOR_TAG,
            neighbors=ranks,
            sendcounts=send,
            recvcounts=receive,
        )
        return y

    return over_packed(exchange, x, leading=(1, 1))
