"""Collectives with another number of rows on each rank, also with neighbouring ranks only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, derivative_slot, resolve
from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.carrier import carrier
from mpigrad.operations.primitive import check_arithmetic, linear_map
from mpigrad.operations.pytree_packing import apply_packed, arrays, bind_packed, describe_leaves
from mpigrad.operations.reduce_operators import Messages, Reduction, bind_reduction, fold
from mpigrad.runtime.call_sites import call_site, describe, note_neighbors
from mpigrad.runtime.native import NO_REDUCTION, SUM, TAG_LIMIT, words_per_element

__all__ = [
    "allgatherv",
    "alltoallv",
    "check_counts",
    "exchange_with_neighbors",
    "gatherv",
    "neighbor_alltoallv",
    "reduce_scatterv",
    "scatterv",
]

# ---- The v-collectives: collectives with another number of rows on each rank ----
#
# Rows are concatenated along axis 0. Counts are Python integers and the same list on every rank.
# A count may be zero.


def _rows(n: int, x: Any) -> ShapedArray:
    return ShapedArray((n, *x.shape[1:]), x.dtype)


def _summed(x: Any, *, own: int, site: int, **_: Any) -> ShapedArray:
    check_arithmetic("reduce_scatterv", x, site)
    return _rows(own, x)


def _moving(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    x = avals[0]
    attributes = {name: value for name, value in params.items() if name != "own"}
    return {**attributes, "row": math.prod(x.shape[1:]) * words_per_element(x.dtype)}


def _adding(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    return {**_moving(avals, params), "row": math.prod(avals[0].shape[1:])}


# gatherv ↔ scatterv, allgatherv ↔ reduce_scatterv(SUM), alltoallv ↔ alltoallv with the counts
# exchanged. `own` is the number of rows of this rank, `row` the length of one for MPI.
gatherv_p: Primitive = linear_map(
    "gatherv",
    result=lambda x, *, counts, **_: _rows(sum(counts), x),
    attributes=_moving,
    batch_axes=(1, 1),
    transpose=lambda ct, x, a, **params: scatterv_p.bind(ct, a, own=x.shape[0], **params)[0],
)
scatterv_p: Primitive = linear_map(
    "scatterv",
    result=lambda x, *, own, **_: _rows(own, x),
    attributes=_moving,
    batch_axes=(1, 1),
    transpose=lambda ct, x, a, *, own, **params: gatherv_p.bind(ct, a, **params)[0],
)
allgatherv_p: Primitive = linear_map(
    "allgatherv",
    result=lambda x, *, counts, **_: _rows(sum(counts), x),
    attributes=_moving,
    batch_axes=(1, 1),
    transpose=lambda ct, x, a, **params: reduce_scatterv_p.bind(
        ct, a, op=SUM, own=x.shape[0], **params
    )[0],
)
reduce_scatterv_p: Primitive = linear_map(
    "reduce_scatterv",
    result=_summed,
    attributes=_adding,
    batch_axes=(1, 1),
    transpose=lambda ct, x, a, *, op, own, **params: allgatherv_p.bind(ct, a, **params)[0],
)
alltoallv_p: Primitive = linear_map(
    "alltoallv",
    result=lambda x, *, recvcounts, **_: _rows(sum(recvcounts), x),
    attributes=lambda avals, params: {"op": NO_REDUCTION, **_moving(avals, params)},
    batch_axes=(1, 1),
    transpose=lambda ct, x, a, *, sendcounts, recvcounts, **params: alltoallv_p.bind(
        ct, a, sendcounts=recvcounts, recvcounts=sendcounts, **params
    )[0],
)


def check_counts(what: str, counts: Sequence[int], comm: Communicator) -> tuple[int, ...]:
    """Return the counts of all ranks as Python integers, or raise an error."""
    try:
        numbers = tuple(int(n.__index__()) for n in counts)
    except (AttributeError, TypeError, jax.errors.JAXTypeError):
        raise TypeError(
            f"{what} must be Python integers, known before the program runs, got {counts!r} on "
            f"rank {comm.rank}. Compute them outside of traced code."
        ) from None
    if len(numbers) != comm.size:
        raise ValueError(
            f"{what} must have one entry for each of the {comm.size} ranks, got {len(numbers)} "
            f"entries on rank {comm.rank}. Give the same list on every rank."
        )
    if min(numbers) < 0:
        raise ValueError(
            f"{what} must not be negative, got {numbers} on rank {comm.rank}. Give 0 for a rank "
            "without rows."
        )
    return numbers


def _check_rows(operation: str, x: Any, rows: int, meaning: str, comm: Communicator) -> None:
    for leaf in jax.tree.leaves(x):
        if not jnp.shape(leaf) or jnp.shape(leaf)[0] != rows:
            raise ValueError(
                f"{operation}: axis 0 of x must have {meaning} = {rows} rows, got shape "
                f"{jnp.shape(leaf)} on rank {comm.rank}. Change x or the counts."
            )


def gatherv(x: Any, counts: Sequence[int], root: int = 0, comm: Communicator | None = None) -> Any:
    """Concatenate the rows of all ranks on the root, with zeros on the other ranks.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (counts[rank], ...).
    counts
        The number of rows of each rank: Python integers, the same on every rank.
    root
        The rank that receives: a Python integer.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Arrays of shape (sum(counts), ...) on every rank. The adjoint is `scatterv` from the root.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.gatherv(jnp.arange(3.0), counts=[3], root=0)
    Array([0., 1., 2.], dtype=float32)
    """
    comm = resolve(comm)
    numbers = check_counts("gatherv: counts", counts, comm)
    _check_rows("gatherv", x, numbers[comm.rank], f"counts[{comm.rank}]", comm)
    root = check_rank(root, comm, "gatherv: root")
    return bind_packed(gatherv_p, x, comm, (1, 1), root=root, counts=numbers)


def scatterv(x: Any, counts: Sequence[int], root: int = 0, comm: Communicator | None = None) -> Any:
    """Send the next counts[r] rows of the root's `x` to each rank r.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (sum(counts), ...) on every rank. Only
        the values of the root are used.
    counts
        The number of rows of each rank: Python integers, the same on every rank.
    root
        The rank that sends: a Python integer.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Arrays of shape (counts[rank], ...). The adjoint is `gatherv` onto the root.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.scatterv(jnp.arange(3.0), counts=[3], root=0)
    Array([0., 1., 2.], dtype=float32)
    """
    comm = resolve(comm)
    numbers = check_counts("scatterv: counts", counts, comm)
    _check_rows("scatterv", x, sum(numbers), "sum(counts)", comm)
    root = check_rank(root, comm, "scatterv: root")
    n_rows = numbers[comm.rank]
    return bind_packed(scatterv_p, x, comm, (1, 1), root=root, counts=numbers, own=n_rows)


def allgatherv(x: Any, counts: Sequence[int], comm: Communicator | None = None) -> Any:
    """Concatenate the rows of all ranks on every rank.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (counts[rank], ...).
    counts
        The number of rows of each rank: Python integers, the same on every rank.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Arrays of shape (sum(counts), ...). The adjoint is `reduce_scatterv(SUM)`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.allgatherv(jnp.arange(3.0), counts=[3])
    Array([0., 1., 2.], dtype=float32)
    """
    comm = resolve(comm)
    numbers = check_counts("allgatherv: counts", counts, comm)
    _check_rows("allgatherv", x, numbers[comm.rank], f"counts[{comm.rank}]", comm)
    return bind_packed(allgatherv_p, x, comm, (1, 1), counts=numbers)


def reduce_scatterv(
    x: Any,
    counts: Sequence[int],
    op: MPI.Op | Reduction = MPI.SUM,
    comm: Communicator | None = None,
) -> Any:
    """Reduce the `x` of all ranks, with the next counts[r] rows of the result on each rank r.

    Parameters
    ----------
    x
        Array or pytree of arrays of shape (sum(counts), ...), with the same shapes and dtypes on
        every rank.
    counts
        The number of rows that each rank receives: Python integers, the same on every rank.
    op
        The reduction, as for `allreduce`.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Arrays of shape (counts[rank], ...). The adjoint is `allgatherv`, for sums.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.reduce_scatterv(jnp.arange(3.0), counts=[3])
    Array([0., 1., 2.], dtype=float32)
    """
    comm = resolve(comm)
    numbers = check_counts("reduce_scatterv: counts", counts, comm)
    _check_rows("reduce_scatterv", x, sum(numbers), "sum(counts)", comm)
    n_rows = numbers[comm.rank]
    exchange = {"sendcounts": numbers, "recvcounts": (n_rows,) * comm.size}
    return bind_reduction(
        x,
        op,
        comm,
        native=Messages(reduce_scatterv_p, {"counts": numbers, "own": n_rows}, (1, 1)),
        rows=Messages(alltoallv_p, exchange, (1, 1)),
        fold_rows=lambda rows: fold(op, rows.reshape(comm.size, n_rows, *rows.shape[1:])),
    )


def alltoallv(
    x: Any,
    sendcounts: Sequence[int],
    recvcounts: Sequence[int],
    comm: Communicator | None = None,
) -> Any:
    """Send the next sendcounts[s] rows of `x` to each rank s, and receive recvcounts[s] rows.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (sum(sendcounts), ...): the rows for
        rank 0, then the rows for rank 1, and so on.
    sendcounts, recvcounts
        The number of rows for each rank, and from each rank: Python integers. sendcounts[s] on rank
        r equals recvcounts[r] on rank s.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Arrays of shape (sum(recvcounts), ...), in the same order. The adjoint is `alltoallv` with the
    counts exchanged.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.alltoallv(jnp.arange(3.0), sendcounts=[3], recvcounts=[3])
    Array([0., 1., 2.], dtype=float32)
    """
    comm = resolve(comm)
    send = check_counts("alltoallv: sendcounts", sendcounts, comm)
    receive = check_counts("alltoallv: recvcounts", recvcounts, comm)
    _check_rows("alltoallv", x, sum(send), "sum(sendcounts)", comm)
    if send[comm.rank] != receive[comm.rank]:
        raise ValueError(
            f"alltoallv: the rows that a rank sends to itself must be as many as it receives "
            f"from itself, got sendcounts {send[comm.rank]} and recvcounts {receive[comm.rank]} "
            f"on rank {comm.rank}. Make the two counts equal."
        )
    return bind_packed(alltoallv_p, x, comm, (1, 1), sendcounts=send, recvcounts=receive)


# ---- Exchange with the neighbouring ranks, by one packed message to and from each ----


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
