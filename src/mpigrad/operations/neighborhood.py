"""Exchange with the neighbouring ranks, by one packed message to and from each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpigrad.communicator import Communicator, check_rank, derivative_slot, resolve
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.carrier import carrier
from mpigrad.operations.primitive import linear_map
from mpigrad.operations.pytree_packing import apply_packed, arrays, describe_leaves
from mpigrad.runtime.call_sites import call_site, describe, note_neighbors
from mpigrad.runtime.native import TAG_LIMIT, words_per_element

__all__ = ["exchange_with_neighbors", "neighbor_alltoallv"]

NEIGHBOR_TAG = TAG_LIMIT + 1  # neither a program nor one of its derivatives uses this tag


def _result(x: Any, *, recvcounts: tuple[int, ...], **_: Any) -> ShapedArray:
    return ShapedArray((sum(recvcounts), *x.shape[1:]), x.dtype)


def _transpose(ct: Any, x: Any, a: Any, *, sendcounts: Any, recvcounts: Any, **params: Any) -> Any:
    return neighbor_alltoallv_p.bind(ct, a, sendcounts=recvcounts, recvcounts=sendcounts, **params)[
        0
    ]


def _attributes(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    x = avals[0]
    params = {"operation": "neighbor_alltoallv", **params}
    return {**params, "row_words": math.prod(x.shape[1:]) * words_per_element(x.dtype)}


def _batched(params: dict[str, Any], n: int) -> dict[str, Any]:
    """Refuse a batch by which lineax builds the matrix of a function."""
    if params["neighbors"] and compat.in_lineax_operator():
        raise ValueError(
            f"halo exchange at {describe(abs(params['site']))}: expected none in a function whose "
            "matrix lineax builds, for a direct linear solver or for Newton steps of optimistix or "
            "diffrax. Each column would be a sum over the ranks, and the solution or its gradient "
            "would be wrong. Use mpigrad.sparse.newton or mpigrad.sparse.solve."
        )
    return params


neighbor_alltoallv_p: Primitive = linear_map(
    "neighbor_alltoallv",
    result=_result,
    attributes=_attributes,
    batch_axes=(1, 1),
    batch_params=_batched,
    transpose=_transpose,
)


def neighbor_alltoallv(
    x: Any,
    neighbors: Sequence[int],
    sendcounts: Sequence[int],
    recvcounts: Sequence[int],
    comm: Communicator | None = None,
) -> Any:
    """Exchange rows with the neighbouring ranks, by one message of each dtype in each direction.

    Parameters
    ----------
    x
        Array or pytree of arrays of shape (sum(sendcounts), ...): the rows for neighbors[0], then
        the rows for neighbors[1], and so on.
    neighbors
        Ranks, without repetition. Rank r names s if and only if s names r.
    sendcounts, recvcounts
        The number of rows for each neighbour, and from each neighbour. If a count is zero, no
        message is sent.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Arrays of shape (sum(recvcounts), ...), in the same order. The adjoint is the same exchange with
    the counts exchanged.

    Examples
    --------
    On one rank, the rank is its own neighbour:

    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.neighbor_alltoallv(jnp.arange(3.0), neighbors=[0], sendcounts=[3], recvcounts=[3])
    Array([0., 1., 2.], dtype=float32)
    """
    return exchange_with_neighbors(
        "neighbor_alltoallv", x, neighbors, sendcounts, recvcounts, resolve(comm)
    )


def exchange_with_neighbors(
    operation: str,
    x: Any,
    neighbors: Sequence[int],
    sendcounts: Sequence[int],
    recvcounts: Sequence[int],
    comm: Communicator,
) -> Any:
    """Apply `neighbor_alltoallv`. Reports, profiles and traces show it as `operation`."""
    ranks = tuple(check_rank(r, comm, "neighbor_alltoallv: neighbors") for r in neighbors)
    send, receive = tuple(int(n) for n in sendcounts), tuple(int(n) for n in recvcounts)
    if not len(ranks) == len(send) == len(receive):
        raise ValueError(
            f"neighbor_alltoallv: expected one sendcount and one recvcount for each neighbour, got "
            f"{len(ranks)} neighbors, {len(send)} sendcounts and {len(receive)} recvcounts on rank "
            f"{comm.rank}. Give three sequences of the same length."
        )
    if len(set(ranks)) != len(ranks):
        raise ValueError(
            f"neighbor_alltoallv: neighbors must not repeat a rank, got {ranks} on rank "
            f"{comm.rank}. Name each rank once."
        )
    if min((*send, *receive, 0)) < 0:
        raise ValueError(
            f"neighbor_alltoallv: counts must not be negative, got sendcounts {send} and "
            f"recvcounts {receive} on rank {comm.rank}. Give 0 for no rows."
        )
    for leaf in jax.tree.leaves(arrays("neighbor_alltoallv", x)):
        shape = jnp.shape(leaf)
        if not shape or shape[0] != sum(send):
            raise ValueError(
                f"neighbor_alltoallv: axis 0 of x must have sum(sendcounts) = {sum(send)} rows, "
                f"got shape {shape} on rank {comm.rank}. Change x or sendcounts."
            )
    site, a = call_site(describe_leaves(x, 1)), carrier()
    # On another communicator than the wildcard receives of the program.
    slot = derivative_slot(comm.slot)
    note_neighbors(operation, slot, site, zip(ranks, receive, send, strict=True))

    def exchange(leaf: Any) -> Any:
        (y,) = neighbor_alltoallv_p.bind(
            leaf,
            a,
            comm=slot,
            site=site,
            tag=NEIGHBOR_TAG,
            neighbors=ranks,
            sendcounts=send,
            recvcounts=receive,
            operation=operation,
        )
        return y

    return apply_packed(exchange, x, leading=(1, 1))
