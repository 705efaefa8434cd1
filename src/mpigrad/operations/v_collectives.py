"""Collectives with a number of rows of its own for each rank: the v-forms.

Rows are concatenated along axis 0. Counts are Python integers, known before the program runs, and
the same list on every rank; a count may be zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.primitive import check_arithmetic, linear_map
from mpigrad.operations.pytree_packing import packed
from mpigrad.operations.reductions import Reduction, check_op, fold, reduced
from mpigrad.runtime.native import NO_REDUCTION, SUM, words_per_element

__all__ = ["allgatherv", "alltoallv", "check_counts", "gatherv", "reduce_scatterv", "scatterv"]


def _rows(n: int, x: Any) -> ShapedArray:
    return ShapedArray((n, *x.shape[1:]), x.dtype)


def _summed(x: Any, *, own: int, site: int, **_: Any) -> ShapedArray:
    check_arithmetic("reduce_scatterv", x, site)
    return _rows(own, x)


def _moving(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    x = avals[0]
    given = {name: value for name, value in params.items() if name != "own"}
    return {**given, "row": math.prod(x.shape[1:]) * words_per_element(x.dtype)}


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
    """The counts, one for each rank, as Python integers; an error otherwise."""
    try:
        numbers = tuple(int(n.__index__()) for n in counts)
    except (AttributeError, TypeError, jax.errors.JAXTypeError):
        raise TypeError(
            f"{what}={counts!r} must be Python integers, known before the program runs"
        ) from None
    if len(numbers) != comm.size:
        raise ValueError(
            f"{what} has {len(numbers)} entries on rank {comm.rank}; give one for each of the "
            f"{comm.size} ranks"
        )
    if min(numbers) < 0:
        raise ValueError(f"{what}={numbers} on rank {comm.rank}: a count must not be negative")
    return numbers


def _check_rows(operation: str, x: Any, rows: int, meaning: str, comm: Communicator) -> None:
    for leaf in jax.tree.leaves(x):
        if not jnp.shape(leaf) or jnp.shape(leaf)[0] != rows:
            raise ValueError(
                f"{operation}: x has shape {jnp.shape(leaf)} on rank {comm.rank}; its axis 0 must "
                f"have {meaning} = {rows} rows"
            )


def gatherv(x: Any, counts: Sequence[int], root: int = 0, comm: Communicator | None = None) -> Any:
    """All ranks' rows, one rank's after the other's, on the root; zeros elsewhere.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (counts[rank], ...).
    counts
        The number of rows of each rank; the same on every rank.
    root
        The rank that receives.

    Returns
    -------
    Arrays of shape (sum(counts), ...) on every rank. The adjoint is `scatterv` from the root.
    """
    comm = resolve(comm)
    numbers = check_counts("gatherv: counts", counts, comm)
    _check_rows("gatherv", x, numbers[comm.rank], f"counts[{comm.rank}]", comm)
    root = check_rank(root, comm, "gatherv: root")
    return packed(gatherv_p, x, comm, (1, 1), root=root, counts=numbers)


def scatterv(x: Any, counts: Sequence[int], root: int = 0, comm: Communicator | None = None) -> Any:
    """The next counts[r] rows of the root's `x` on each rank r.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (sum(counts), ...) on every rank; only
        the root's values count.
    counts
        The number of rows of each rank; the same on every rank.
    root
        The rank that sends.

    Returns
    -------
    Arrays of shape (counts[rank], ...). The adjoint is `gatherv` onto the root.
    """
    comm = resolve(comm)
    numbers = check_counts("scatterv: counts", counts, comm)
    _check_rows("scatterv", x, sum(numbers), "sum(counts)", comm)
    root = check_rank(root, comm, "scatterv: root")
    own = numbers[comm.rank]
    return packed(scatterv_p, x, comm, (1, 1), root=root, counts=numbers, own=own)


def allgatherv(x: Any, counts: Sequence[int], comm: Communicator | None = None) -> Any:
    """All ranks' rows, one rank's after the other's, on every rank.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (counts[rank], ...).
    counts
        The number of rows of each rank; the same on every rank.

    Returns
    -------
    Arrays of shape (sum(counts), ...). The adjoint is `reduce_scatterv(SUM)`.
    """
    comm = resolve(comm)
    numbers = check_counts("allgatherv: counts", counts, comm)
    _check_rows("allgatherv", x, numbers[comm.rank], f"counts[{comm.rank}]", comm)
    return packed(allgatherv_p, x, comm, (1, 1), counts=numbers)


def reduce_scatterv(
    x: Any,
    counts: Sequence[int],
    op: MPI.Op | Reduction = MPI.SUM,
    comm: Communicator | None = None,
) -> Any:
    """The reduction over all ranks of their `x`, of which rank r gets the next counts[r] rows.

    Parameters
    ----------
    x
        Array or pytree of arrays of shape (sum(counts), ...), of the same shapes and dtypes on
        every rank.
    counts
        The number of rows that each rank gets; the same on every rank.
    op
        As for `allreduce`.

    Returns
    -------
    Arrays of shape (counts[rank], ...). The adjoint is `allgatherv`, for sums.
    """
    comm = resolve(comm)
    numbers = check_counts("reduce_scatterv: counts", counts, comm)
    check_op("reduce_scatterv", x, op)
    _check_rows("reduce_scatterv", x, sum(numbers), "sum(counts)", comm)
    own = numbers[comm.rank]

    def move(leaf: Any, a: Any, **where: int) -> Any:
        mine = (own,) * comm.size
        return alltoallv_p.bind(leaf, a, sendcounts=numbers, recvcounts=mine, **where)[0]

    return reduced(
        reduce_scatterv_p,
        x,
        op,
        comm,
        move,
        lambda rows: fold(op, rows.reshape(comm.size, own, *rows.shape[1:])),
        leading=(1, 1),
        moved=(1, 1),
        counts=numbers,
        own=own,
    )


def alltoallv(
    x: Any,
    sendcounts: Sequence[int],
    recvcounts: Sequence[int],
    comm: Communicator | None = None,
) -> Any:
    """The next sendcounts[s] rows of `x` go to each rank s, recvcounts[s] rows come from it.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (sum(sendcounts), ...): the rows for
        rank 0, then those for rank 1, and so on.
    sendcounts, recvcounts
        The number of rows for, and from, each rank: sendcounts[s] on rank r is recvcounts[r] on
        rank s.

    Returns
    -------
    Arrays of shape (sum(recvcounts), ...), in the same order. The adjoint is `alltoallv` with the
    counts exchanged.
    """
    comm = resolve(comm)
    send = check_counts("alltoallv: sendcounts", sendcounts, comm)
    receive = check_counts("alltoallv: recvcounts", recvcounts, comm)
    _check_rows("alltoallv", x, sum(send), "sum(sendcounts)", comm)
    if send[comm.rank] != receive[comm.rank]:
        raise ValueError(
            f"alltoallv: rank {comm.rank} sends itself {send[comm.rank]} rows and expects "
            f"{receive[comm.rank]} from itself"
        )
    return packed(alltoallv_p, x, comm, (1, 1), sendcounts=send, recvcounts=receive)
