"""Collectives whose shapes are the same on every rank, and the reductions among them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.carrier import carrier, follow
from mpigrad.operations.primitive import (
    check_arithmetic,
    effect_primitive,
    linear_map,
    weighted_map,
)
from mpigrad.operations.pytree_packing import packed
from mpigrad.operations.reductions import (
    Reduction,
    check_op,
    fold,
    product_of_others,
    reduced,
)
from mpigrad.runtime.call_sites import call_site
from mpigrad.runtime.native import NO_REDUCTION, NO_ROOT, REDUCTIONS, SUM

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bcast",
    "exscan",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
]


def _same(x: Any, **_: Any) -> ShapedArray:
    return ShapedArray(x.shape, x.dtype)


def _gathered(x: Any, *, size: int, **_: Any) -> ShapedArray:
    return ShapedArray((size, *x.shape), x.dtype)


def _scattered(x: Any, **_: Any) -> ShapedArray:
    return ShapedArray(x.shape[1:], x.dtype)


def _added(name: str, result: Callable[..., ShapedArray]) -> Callable[..., ShapedArray]:
    """The shape of a reduction's result, of dtypes that MPI can add."""

    def checked(x: Any, *, site: int, **params: Any) -> ShapedArray:
        check_arithmetic(name, x, site)
        return result(x, **params)

    return checked


def _without_size(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name not in ("rank", "size")}


def _to_all(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Of allreduce: where only a root wants the result, the guard compares it."""
    return {"root": NO_ROOT, **_without_size(avals, params)}


def _moving(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Of messages that may move values for a reduction: its `op` is compared by the guard."""
    return {"op": NO_REDUCTION, **_without_size(avals, params)}


# bcast ↔ reduce(SUM), allreduce ↔ allreduce, gather ↔ scatter, allgather ↔ reduce_scatter(SUM),
# alltoall ↔ alltoall, scan ↔ scan from the last rank to the first, and so exscan.
bcast_p: Primitive = linear_map(
    "bcast",
    result=_same,
    in_place=True,
    transpose=lambda ct, x, a, **params: reduce_p.bind(ct, a, op=SUM, **params)[0],
)
reduce_p: Primitive = linear_map(
    "reduce",
    result=_added("reduce", _same),
    transpose=lambda ct, x, a, *, op, **params: bcast_p.bind(ct, a, **params)[0],
)
allreduce_p: Primitive = linear_map(
    "allreduce",
    result=_same,
    in_place=True,
    attributes=_to_all,
    transpose=lambda ct, x, a, **params: allreduce_p.bind(ct, a, **params)[0],
)
gather_p: Primitive = linear_map(
    "gather",
    result=_gathered,
    attributes=_moving,
    batch_axes=(0, 1),
    transpose=lambda ct, x, a, *, op=0, **params: scatter_p.bind(ct, a, **params)[0],
)
scatter_p: Primitive = linear_map(
    "scatter",
    result=_scattered,
    attributes=_without_size,
    batch_axes=(1, 0),
    transpose=lambda ct, x, a, **params: gather_p.bind(ct, a, **params)[0],
)
allgather_p: Primitive = linear_map(
    "allgather",
    result=_gathered,
    attributes=_moving,
    batch_axes=(0, 1),
    transpose=lambda ct, x, a, *, size, op=0, **params: reduce_scatter_p.bind(
        ct, a, op=SUM, **params
    )[0],
)
reduce_scatter_p: Primitive = linear_map(
    "reduce_scatter",
    result=_added("reduce_scatter", _scattered),
    batch_axes=(1, 0),
    transpose=lambda ct, x, a, *, op, **params: allgather_p.bind(ct, a, size=x.shape[0], **params)[
        0
    ],
)
alltoall_p: Primitive = linear_map(
    "alltoall",
    result=_same,
    attributes=_moving,
    batch_axes=(1, 1),
    transpose=lambda ct, x, a, **params: alltoall_p.bind(ct, a, **params)[0],
)
scan_p: Primitive = linear_map(
    "scan",
    result=_same,
    transpose=lambda ct, x, a, *, backward, **params: scan_p.bind(
        ct, a, backward=1 - backward, **params
    )[0],
)
exscan_p: Primitive = linear_map(
    "exscan",
    result=_same,
    transpose=lambda ct, x, a, *, backward, **params: exscan_p.bind(
        ct, a, backward=1 - backward, **params
    )[0],
)
barrier_p: Primitive = effect_primitive(
    "barrier", operands=0, batch=lambda args, dims, params: (jnp.sum(args[0]),)
)


def _total(t: Any, a: Any, *, op: int, rank: int, size: int, **where: int) -> Any:
    return allreduce_p.bind(t, a, op=SUM, **where)[0]


def _others(
    x: Any, a: Any, results: Any, *, op: int, rank: int, size: int, root: int = 0, **where: int
) -> Any:
    return product_of_others(allgather_p.bind(x, a, size=size, **where)[0], rank)


def _share_of_ties(
    x: Any, a: Any, results: Any, *, op: int, rank: int, size: int, **where: int
) -> Any:
    mine = results[1]
    ties = allreduce_p.bind(mine.astype("int32"), a, op=SUM, **where)[0]
    return mine.astype(x.dtype) / ties.astype(x.dtype)


product_p: Primitive = weighted_map(
    "product",
    target="mpigrad_allreduce",
    result=_same,
    in_place=True,
    attributes=_to_all,
    weight=_others,
    total=_total,
)
# The maximum or minimum, and where it is this rank's own. The handler compares what was sent:
# XLA may compute x once for the message and again, rounded differently, for a comparison.
extremum_p: Primitive = weighted_map(
    "extremum",
    result=lambda x, **_: [_same(x), ShapedArray(x.shape, np.dtype(bool))],
    attributes=lambda avals, params: {
        "largest": int(REDUCTIONS[params["op"]] == MPI.MAX),
        **_to_all(avals, params),
    },
    weight=_share_of_ties,
    total=_total,
)


def _nonlinear(x: Any, a: Any, *, op: int, **params: int) -> Any:
    primitive = product_p if REDUCTIONS[op] == MPI.PROD else extremum_p
    return primitive.bind(x, a, op=op, **params)[0]


def _check_rows(name: str, x: Any, comm: Communicator, remedy: str = "") -> None:
    for leaf in jax.tree.leaves(x):
        if not jnp.shape(leaf) or jnp.shape(leaf)[0] != comm.size:
            raise ValueError(
                f"{name}: x has shape {jnp.shape(leaf)} on rank {comm.rank}; its leading axis "
                f"must have one row for each of the {comm.size} ranks{remedy}"
            )


def _no_result(of: Callable[[Any], Any], x: Any) -> Any:
    """Zeros in the shapes of of(x), batched as it is, and active where `x` is."""

    def zeros(y: Any) -> Any:
        # Not active by y: its derivative may be infinite, on zeros that nobody has sent.
        return follow(follow(jnp.zeros_like(y), x), jax.lax.stop_gradient(y))

    return jax.tree.map(zeros, of(x))


def bcast(x: Any, root: int = 0, comm: Communicator | None = None) -> Any:
    """The root's `x` on every rank.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype; the same shapes and dtypes on every rank. Only the
        root's values count.
    root
        The rank that sends.

    Returns
    -------
    The root's values, in the shapes of `x`. The adjoint is `reduce(SUM)` onto the root.
    """
    comm = resolve(comm)
    return packed(bcast_p, x, comm, root=check_rank(root, comm, "bcast: root"))


def reduce(
    x: Any, op: MPI.Op | Reduction = MPI.SUM, root: int = 0, comm: Communicator | None = None
) -> Any:
    """The reduction of all ranks' `x` on the root, zeros elsewhere (where MPI has no result).

    Parameters
    ----------
    x
        Array or pytree of arrays, of the same shapes and dtypes on every rank.
    op
        As for `allreduce`.
    root
        The rank that receives the result.

    Returns
    -------
    The sum, or other reduction, in the shapes of `x`. The adjoint is `bcast` from the root, for
    sums.
    """
    comm = resolve(comm)
    root = check_rank(root, comm, "reduce: root")
    check_op("reduce", x, op)

    def on_root(of: Callable[[Any], Any], x: Any) -> Any:
        return of(x) if comm.rank == root else _no_result(of, x)

    def by_allreduce(leaf: Any, a: Any, **params: int) -> Any:
        params |= {"rank": comm.rank, "size": comm.size, "root": root}
        return on_root(lambda y: y, _nonlinear(leaf, a, **params))

    return reduced(
        reduce_p,
        x,
        op,
        comm,
        lambda leaf, a, **where: gather_p.bind(leaf, a, root=root, size=comm.size, **where)[0],
        lambda rows: on_root(functools.partial(fold, op), rows),
        nonlinear=by_allreduce,
        root=root,
    )


def allreduce(x: Any, op: MPI.Op | Reduction = MPI.SUM, comm: Communicator | None = None) -> Any:
    """The reduction of all ranks' `x`, on every rank.

    Parameters
    ----------
    x
        Array or pytree of arrays, of the same shapes and dtypes on every rank.
    op
        One of mpi4py's operations, or `mpigrad.reduction(fn)`.

        MPI.SUM (integers, float32/64, complex64/128) is linear. MPI.PROD (the same dtypes) has
        its exact derivative, the product of the other ranks' values, also where values are zero.
        MPI.MAX and MPI.MIN (integers, float32/64) share the derivative equally between ties;
        a NaN on any rank is the result.

        MPI.MAXLOC and MPI.MINLOC (the same dtypes) return a pair: the value, and the rank that
        holds it (int32; the lowest one of ties), which the derivative follows.

        MPI.LAND, LOR and LXOR (bool; of integers the result is 0 or 1), and BAND, BOR and BXOR
        (integers) have no derivative.

    Returns
    -------
    The sum, or other reduction, in the shapes of `x`. The adjoint is `allreduce` again, for sums:
    the map is symmetric.
    """
    comm = resolve(comm)
    check_op("allreduce", x, op)
    return reduced(
        allreduce_p,
        x,
        op,
        comm,
        lambda leaf, a, **where: allgather_p.bind(leaf, a, size=comm.size, **where)[0],
        lambda rows: fold(op, rows),
        nonlinear=lambda leaf, a, **params: _nonlinear(
            leaf, a, rank=comm.rank, size=comm.size, **params
        ),
    )


def reduce_scatter(
    x: Any, op: MPI.Op | Reduction = MPI.SUM, comm: Communicator | None = None
) -> Any:
    """The reduction over all ranks of row r of their `x`, on rank r.

    Parameters
    ----------
    x
        Array or pytree of arrays of shape (number of ranks, ...), of the same shapes and dtypes on
        every rank.
    op
        As for `allreduce`.

    Returns
    -------
    Arrays of shape x.shape[1:]. The adjoint is `allgather`, for sums.
    """
    comm = resolve(comm)
    check_op("reduce_scatter", x, op)
    _check_rows("reduce_scatter", x, comm)
    return reduced(
        reduce_scatter_p,
        x,
        op,
        comm,
        lambda leaf, a, **where: alltoall_p.bind(leaf, a, **where)[0],
        lambda rows: fold(op, rows),
        leading=(1, 0),
        moved=(1, 1),
    )


def scan(x: Any, op: MPI.Op | Reduction = MPI.SUM, comm: Communicator | None = None) -> Any:
    """The reduction of `x` over the ranks from 0 up to this one, which is included.

    Parameters
    ----------
    x
        Array or pytree of arrays, of the same shapes and dtypes on every rank.
    op
        As for `allreduce`.

    Returns
    -------
    The sum, or other reduction, in the shapes of `x`. The adjoint is the scan from the last rank
    down to this one, for sums.
    """
    comm = resolve(comm)
    check_op("scan", x, op)
    return reduced(
        scan_p,
        x,
        op,
        comm,
        lambda leaf, a, **where: allgather_p.bind(leaf, a, size=comm.size, **where)[0],
        lambda rows: fold(op, rows[: comm.rank + 1]),
        backward=0,
    )


def exscan(x: Any, op: MPI.Op | Reduction = MPI.SUM, comm: Communicator | None = None) -> Any:
    """The reduction of `x` over the ranks before this one; zeros on rank 0, for every `op`.

    Parameters
    ----------
    x
        Array or pytree of arrays, of the same shapes and dtypes on every rank.
    op
        As for `allreduce`.

    Returns
    -------
    The sum, or other reduction, in the shapes of `x`. The adjoint is the same over the ranks after
    this one, zeros on the last rank, for sums.
    """
    comm = resolve(comm)
    check_op("exscan", x, op)

    def before(rows: Any) -> Any:
        if comm.rank:
            return fold(op, rows[: comm.rank])
        return _no_result(functools.partial(fold, op), rows[:1])

    return reduced(
        exscan_p,
        x,
        op,
        comm,
        lambda leaf, a, **where: allgather_p.bind(leaf, a, size=comm.size, **where)[0],
        before,
        backward=0,
    )


def gather(x: Any, root: int = 0, comm: Communicator | None = None) -> Any:
    """All ranks' `x`, stacked along a new leading axis on the root; zeros elsewhere.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype; the same shapes and dtypes on every rank.
    root
        The rank that receives.

    Returns
    -------
    Arrays of shape (number of ranks, ...). The adjoint is `scatter` from the root.
    """
    comm = resolve(comm)
    root = check_rank(root, comm, "gather: root")
    return packed(gather_p, x, comm, (0, 1), root=root, size=comm.size)


def scatter(x: Any, root: int = 0, comm: Communicator | None = None) -> Any:
    """Row r of the root's `x` on rank r.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (number of ranks, ...) on every rank;
        only the root's values count.
    root
        The rank that sends.

    Returns
    -------
    Arrays of shape x.shape[1:]. The adjoint is `gather` onto the root.
    """
    comm = resolve(comm)
    root = check_rank(root, comm, "scatter: root")
    remedy = " (on every rank: off the root give zeros of the same shape)"
    _check_rows("scatter", x, comm, remedy)
    return packed(scatter_p, x, comm, (1, 0), root=root, size=comm.size)


def allgather(x: Any, comm: Communicator | None = None) -> Any:
    """All ranks' `x`, stacked along a new leading axis, on every rank.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype; the same shapes and dtypes on every rank.

    Returns
    -------
    Arrays of shape (number of ranks, ...). The adjoint is `reduce_scatter(SUM)`.
    """
    comm = resolve(comm)
    return packed(allgather_p, x, comm, (0, 1), size=comm.size)


def alltoall(x: Any, comm: Communicator | None = None) -> Any:
    """Row s of `x` goes to rank s; row s of the result is what rank s sent here.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (number of ranks, ...), the same shapes
        and dtypes on every rank.

    Returns
    -------
    Arrays of the shapes of `x`. The adjoint is `alltoall` again: the map is symmetric.
    """
    comm = resolve(comm)
    _check_rows("alltoall", x, comm)
    return packed(alltoall_p, x, comm, (1, 1))


def barrier(comm: Communicator | None = None) -> None:
    """Wait until every rank of the communicator has come here."""
    barrier_p.bind(carrier(), comm=resolve(comm).slot, site=call_site())
