"""Collectives with the same shapes on every rank, reductions included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator, check_rank, resolve
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.carrier import carrier, tie_in
from mpigrad.operations.primitive import (
    check_arithmetic,
    effect_primitive,
    linear_map,
    weighted_map,
)
from mpigrad.operations.pytree_packing import bind_packed
from mpigrad.operations.reduce_operators import (
    Messages,
    Reduction,
    bind_reduction,
    fold,
    product_of_others,
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

T = TypeVar("T")


def _same(x: Any, **_: Any) -> ShapedArray:
    return ShapedArray(x.shape, x.dtype)


def _gathered(x: Any, *, size: int, **_: Any) -> ShapedArray:
    return ShapedArray((size, *x.shape), x.dtype)


def _scattered(x: Any, **_: Any) -> ShapedArray:
    return ShapedArray(x.shape[1:], x.dtype)


def _added(name: str, result: Callable[..., ShapedArray]) -> Callable[..., ShapedArray]:
    """Return the shape rule of a reduction, for dtypes that MPI can add."""

    def checked(x: Any, *, site: int, **params: Any) -> ShapedArray:
        check_arithmetic(name, x, site)
        return result(x, **params)

    return checked


def _without_size(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name not in ("rank", "size")}


def _to_all(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an allreduce, which has a root if it computes a `reduce`."""
    return {"root": NO_ROOT, **_without_size(avals, params)}


def _moving(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a message that may move the values of a reduction.

    The guard compares the `op` of that reduction.
    """
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
    is_extremum = results[1]
    ties = allreduce_p.bind(is_extremum.astype("int32"), a, op=SUM, **where)[0]
    return is_extremum.astype(x.dtype) / ties.astype(x.dtype)


product_p: Primitive = weighted_map(
    "product",
    target="mpigrad_allreduce",
    result=_same,
    in_place=True,
    attributes=_to_all,
    weight=_others,
    total=_total,
)
# The maximum or minimum, and a mask of the elements in which this rank has it. The handler compares
# the values that were sent: XLA may compute x a second time, with another rounding.
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


def _check_rows(operation: str, x: Any, comm: Communicator, remedy: str = "") -> None:
    for leaf in jax.tree.leaves(x):
        if not jnp.shape(leaf) or jnp.shape(leaf)[0] != comm.size:
            raise ValueError(
                f"{operation}: expected one row for each of the {comm.size} ranks on the leading "
                f"axis of x, got shape {jnp.shape(leaf)} on rank {comm.rank}. Give x the shape "
                f"({comm.size}, ...){remedy}."
            )


def _no_result(of: Callable[[Any], Any], x: Any) -> Any:
    """Return zeros in the shapes of of(x), batched like of(x) and active like `x`."""

    def zeros(y: Any) -> Any:
        # Not active through y: its derivative may be infinite, and no rank has sent these zeros.
        return tie_in(tie_in(jnp.zeros_like(y), x), jax.lax.stop_gradient(y))

    return jax.tree.map(zeros, of(x))


def bcast(x: T, root: int = 0, comm: Communicator | None = None) -> T:
    """Send the root's `x` to every rank.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype, with the same shapes and dtypes on every rank. Only
        the values of the root are used.
    root
        The rank that sends: a Python integer.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    The root's values, in the structure and shapes of `x`. The adjoint is `reduce(SUM)` onto the
    root.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.bcast(jnp.arange(3.0), root=0)
    Array([0., 1., 2.], dtype=float32)
    """
    comm = resolve(comm)
    return bind_packed(bcast_p, x, comm, root=check_rank(root, comm, "bcast: root"))


def reduce(
    x: T, op: MPI.Op | Reduction = MPI.SUM, root: int = 0, comm: Communicator | None = None
) -> T:
    """Reduce the `x` of all ranks onto the root, with zeros on the other ranks.

    Parameters
    ----------
    x
        Array or pytree of arrays, with the same shapes and dtypes on every rank.
    op
        The reduction, as for `allreduce`.
    root
        The rank that receives the result: a Python integer.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    The sum, or other reduction, in the structure and shapes of `x`. MPI leaves the result on the
    other ranks undefined. Here it is zero. For MPI.MAXLOC and MPI.MINLOC it is a pair, as for
    `allreduce`. The adjoint is `bcast` from the root, for sums.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.reduce(jnp.arange(3.0), root=0)
    Array([0., 1., 2.], dtype=float32)
    """
    comm = resolve(comm)
    root = check_rank(root, comm, "reduce: root")

    def on_root(of: Callable[[Any], Any], x: Any) -> Any:
        return of(x) if comm.rank == root else _no_result(of, x)

    def by_allreduce(leaf: Any, a: Any, **params: int) -> Any:
        params |= {"rank": comm.rank, "size": comm.size, "root": root}
        return on_root(lambda y: y, _nonlinear(leaf, a, **params))

    return bind_reduction(
        x,
        op,
        comm,
        native=Messages(reduce_p, {"root": root}),
        rows=Messages(gather_p, {"root": root, "size": comm.size}, (0, 1)),
        fold_rows=lambda rows: on_root(functools.partial(fold, op), rows),
        nonlinear=by_allreduce,
    )


def allreduce(x: T, op: MPI.Op | Reduction = MPI.SUM, comm: Communicator | None = None) -> T:
    """Reduce the `x` of all ranks, with the result on every rank.

    Parameters
    ----------
    x
        Array or pytree of arrays, with the same shapes and dtypes on every rank.
    op
        One of mpi4py's operations, or `mpigrad.reduction(fn)`.

        MPI.SUM (integers, float32/64, complex64/128) is linear. MPI.PROD (the same dtypes) has
        its exact derivative, the product of the other ranks' values, also if values are zero.
        MPI.MAX and MPI.MIN (integers, float32/64) share the derivative equally between ties. If
        any rank has a NaN, the result is NaN.

        MPI.MAXLOC and MPI.MINLOC (the same dtypes) return a pair: the value, and the rank that
        has it (int32, the lowest rank of ties). The derivative goes to that rank.

        MPI.LAND, LOR and LXOR (bool and integers, whose result is 0 or 1) and BAND, BOR and BXOR
        (integers) are not differentiable.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    The sum, or other reduction, in the structure and shapes of `x`. The adjoint is `allreduce`
    again, for sums: the map is symmetric.

    Raises
    ------
    TypeError
        If MPI cannot reduce the dtype of `x` by `op`.
    ValueError
        If `op` is not supported.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.allreduce(jnp.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
    >>> float(mg.grad(lambda x: mg.allreduce(x) ** 2)(3.0))
    6.0
    """
    comm = resolve(comm)
    ranks = {"rank": comm.rank, "size": comm.size}
    return bind_reduction(
        x,
        op,
        comm,
        native=Messages(allreduce_p, {}),
        rows=Messages(allgather_p, {"size": comm.size}, (0, 1)),
        fold_rows=functools.partial(fold, op),
        nonlinear=functools.partial(_nonlinear, **ranks),
    )


def reduce_scatter(
    x: Any, op: MPI.Op | Reduction = MPI.SUM, comm: Communicator | None = None
) -> Any:
    """Reduce row r of the `x` of all ranks onto rank r.

    Parameters
    ----------
    x
        Array or pytree of arrays of shape (number of ranks, ...), with the same shapes and dtypes
        on every rank.
    op
        The reduction, as for `allreduce`.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Arrays of shape x.shape[1:]. The adjoint is `allgather`, for sums.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> size = mg.default_communicator().size
    >>> mg.reduce_scatter(jnp.ones((size, 2)))
    Array([1., 1.], dtype=float32)
    """
    comm = resolve(comm)
    _check_rows("reduce_scatter", x, comm)
    return bind_reduction(
        x,
        op,
        comm,
        native=Messages(reduce_scatter_p, {}, (1, 0)),
        rows=Messages(alltoall_p, {}, (1, 1)),
        fold_rows=functools.partial(fold, op),
    )


def scan(x: T, op: MPI.Op | Reduction = MPI.SUM, comm: Communicator | None = None) -> T:
    """Reduce the `x` of the ranks from 0 to this rank, this rank included.

    Parameters
    ----------
    x
        Array or pytree of arrays, with the same shapes and dtypes on every rank.
    op
        The reduction, as for `allreduce`.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    The sum, or other reduction, in the structure and shapes of `x`. The adjoint is the scan from
    the last rank down to this rank, for sums.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.scan(jnp.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
    """
    comm = resolve(comm)
    return bind_reduction(
        x,
        op,
        comm,
        native=Messages(scan_p, {"backward": 0}),
        rows=Messages(allgather_p, {"size": comm.size}, (0, 1)),
        fold_rows=lambda rows: fold(op, rows[: comm.rank + 1]),
    )


def exscan(x: T, op: MPI.Op | Reduction = MPI.SUM, comm: Communicator | None = None) -> T:
    """Reduce the `x` of the ranks before this rank, with zeros on rank 0 for every `op`.

    Parameters
    ----------
    x
        Array or pytree of arrays, with the same shapes and dtypes on every rank.
    op
        The reduction, as for `allreduce`.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    The sum, or other reduction, in the structure and shapes of `x`. The adjoint is the same over
    the ranks after this rank, with zeros on the last rank, for sums.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.exscan(jnp.arange(3.0))  # no rank stands before rank 0
    Array([0., 0., 0.], dtype=float32)
    """
    comm = resolve(comm)

    def fold_before(rows: Any) -> Any:
        if comm.rank:
            return fold(op, rows[: comm.rank])
        return _no_result(functools.partial(fold, op), rows[:1])

    return bind_reduction(
        x,
        op,
        comm,
        native=Messages(exscan_p, {"backward": 0}),
        rows=Messages(allgather_p, {"size": comm.size}, (0, 1)),
        fold_rows=fold_before,
    )


def gather(x: Any, root: int = 0, comm: Communicator | None = None) -> Any:
    """Stack the `x` of all ranks on the root, with zeros on the other ranks.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype, with the same shapes and dtypes on every rank.
    root
        The rank that receives: a Python integer.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Arrays of shape (number of ranks, *x.shape). The adjoint is `scatter` from the root.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.gather(jnp.arange(3.0), root=0)
    Array([[0., 1., 2.]], dtype=float32)
    """
    comm = resolve(comm)
    root = check_rank(root, comm, "gather: root")
    return bind_packed(gather_p, x, comm, (0, 1), root=root, size=comm.size)


def scatter(x: Any, root: int = 0, comm: Communicator | None = None) -> Any:
    """Send row r of the root's `x` to rank r.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (number of ranks, ...) on every rank.
        Only the values of the root are used.
    root
        The rank that sends: a Python integer.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Arrays of shape x.shape[1:]. The adjoint is `gather` onto the root.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> size = mg.default_communicator().size
    >>> mg.scatter(jnp.ones((size, 2)), root=0)
    Array([1., 1.], dtype=float32)
    """
    comm = resolve(comm)
    root = check_rank(root, comm, "scatter: root")
    _check_rows("scatter", x, comm, " on every rank, zeros off the root for example")
    return bind_packed(scatter_p, x, comm, (1, 0), root=root, size=comm.size)


def allgather(x: Any, comm: Communicator | None = None) -> Any:
    """Stack the `x` of all ranks along a new leading axis, on every rank.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype, with the same shapes and dtypes on every rank.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Arrays of shape (number of ranks, *x.shape). The adjoint is `reduce_scatter(SUM)`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> mg.allgather(jnp.arange(3.0))
    Array([[0., 1., 2.]], dtype=float32)
    """
    comm = resolve(comm)
    return bind_packed(allgather_p, x, comm, (0, 1), size=comm.size)


def alltoall(x: T, comm: Communicator | None = None) -> T:
    """Send row s of `x` to rank s, and receive a row from every rank.

    Parameters
    ----------
    x
        Array or pytree of arrays of any dtype and of shape (number of ranks, ...), with the same
        shapes and dtypes on every rank.
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Returns
    -------
    Arrays of the shapes of `x`. Row s was sent by rank s. The adjoint is `alltoall` again: the
    map is symmetric.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import mpigrad as mg
    >>> size = mg.default_communicator().size
    >>> mg.alltoall(jnp.ones((size, 2)))
    Array([[1., 1.]], dtype=float32)
    """
    comm = resolve(comm)
    _check_rows("alltoall", x, comm)
    return bind_packed(alltoall_p, x, comm, (1, 1))


def barrier(comm: Communicator | None = None) -> None:
    """Wait until every rank of the communicator has called `barrier`.

    Parameters
    ----------
    comm
        The communicator. Default: the communicator of the enclosing `with`, or all ranks.

    Examples
    --------
    >>> import mpigrad as mg
    >>> mg.barrier()
    """
    barrier_p.bind(carrier(), comm=resolve(comm).slot, site=call_site())
