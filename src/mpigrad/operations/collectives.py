"""Collectives: bcast, reduce, allreduce, gather, scatter, barrier."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpigrad.communicator import (
    ARITHMETIC_DTYPES,
    REDUCTIONS,
    SUM,
    Communicator,
    check_rank,
    resolve,
)
from mpigrad.operations._jax_compat import Primitive, ShapedArray
from mpigrad.operations.activity import carrier
from mpigrad.operations.factory import effect_primitive, linear_map
from mpigrad.operations.packing import over_packed
from mpigrad.operations.sites import call_site

__all__ = ["allreduce", "barrier", "bcast", "gather", "reduce", "scatter"]


def _same(x: Any, **_: Any) -> ShapedArray:
    return ShapedArray(x.shape, x.dtype)


def _gathered(x: Any, *, size: int, **_: Any) -> ShapedArray:
    return ShapedArray((size, *x.shape), x.dtype)


def _scattered(x: Any, **_: Any) -> ShapedArray:
    return ShapedArray(x.shape[1:], x.dtype)


def _without_size(avals: Any, params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "size"}


# bcast ↔ reduce(SUM), allreduce ↔ allreduce, gather ↔ scatter.
bcast_p: Primitive = linear_map(
    "bcast",
    result=_same,
    in_place=True,
    transpose=lambda ct, x, a, **params: reduce_p.bind(ct, a, op=SUM, **params)[0],
)
reduce_p: Primitive = linear_map(
    "reduce",
    result=_same,
    transpose=lambda ct, x, a, *, op, **params: bcast_p.bind(ct, a, **params)[0],
)
allreduce_p: Primitive = linear_map(
    "allreduce",
    result=_same,
    in_place=True,
    transpose=lambda ct, x, a, **params: allreduce_p.bind(ct, a, **params)[0],
)
gather_p: Primitive = linear_map(
    "gather",
    result=_gathered,
    attributes=_without_size,
    batch_axes=(0, 1),
    transpose=lambda ct, x, a, **params: scatter_p.bind(ct, a, **params)[0],
)
scatter_p: Primitive = linear_map(
    "scatter",
    result=_scattered,
    attributes=_without_size,
    batch_axes=(1, 0),
    transpose=lambda ct, x, a, **params: gather_p.bind(ct, a, **params)[0],
)
barrier_p: Primitive = effect_primitive(
    "barrier", operands=0, batch=lambda args, dims, params: (jnp.sum(args[0]),)
)


def _packed(
    primitive: Primitive,
    x: Any,
    comm: Communicator,
    leading: tuple[int, int] = (0, 0),
    **params: Any,
) -> Any:
    site, a = call_site(), carrier()
    return over_packed(
        lambda leaf: primitive.bind(leaf, a, comm=comm.slot, site=site, **params)[0],
        x,
        leading=leading,
    )


def _check_sum(name: str, x: Any, op: MPI.Op) -> int:
    if op not in REDUCTIONS:
        raise ValueError(f"{name}: op={op!r} is not supported yet; MPI.SUM is")
    for leaf in jax.tree.leaves(x):
        dtype = np.dtype(leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf))
        if dtype.name not in ARITHMETIC_DTYPES:
            raise TypeError(
                f"{name}: MPI cannot add {dtype.name}; convert it first, for instance "
                f"x.astype({'int32' if dtype.kind == 'b' else 'float32'!r})"
            )
    return REDUCTIONS.index(op)


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
    return _packed(bcast_p, x, comm, root=check_rank(root, comm, "bcast: root"))


def reduce(x: Any, op: MPI.Op = MPI.SUM, root: int = 0, comm: Communicator | None = None) -> Any:
    """The sum of all ranks' `x` on the root, zeros elsewhere (where MPI leaves it undefined).

    Parameters
    ----------
    x
        Array or pytree of arrays (integers, float32/64, complex64/128), of the same shapes and
        dtypes on every rank.
    op
        MPI.SUM.
    root
        The rank that receives the sum.

    Returns
    -------
    The sum in the shapes of `x`. The adjoint is `bcast` from the root.
    """
    comm = resolve(comm)
    slot = _check_sum("reduce", x, op)
    return _packed(reduce_p, x, comm, op=slot, root=check_rank(root, comm, "reduce: root"))


def allreduce(x: Any, op: MPI.Op = MPI.SUM, comm: Communicator | None = None) -> Any:
    """The sum of all ranks' `x`, on every rank.

    Parameters
    ----------
    x
        Array or pytree of arrays (integers, float32/64, complex64/128), of the same shapes and
        dtypes on every rank.
    op
        MPI.SUM.

    Returns
    -------
    The sum in the shapes of `x`. The map is symmetric: its adjoint is `allreduce` again.
    """
    comm = resolve(comm)
    return _packed(allreduce_p, x, comm, op=_check_sum("allreduce", x, op))


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
    return _packed(gather_p, x, comm, (0, 1), root=root, size=comm.size)


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
    for leaf in jax.tree.leaves(x):
        if not jnp.shape(leaf) or jnp.shape(leaf)[0] != comm.size:
            raise ValueError(
                f"scatter: x has shape {jnp.shape(leaf)} on rank {comm.rank}; its leading axis "
                f"must have one row for each of the {comm.size} ranks (on every rank: off the "
                f"root give zeros of the same shape)"
            )
    return _packed(scatter_p, x, comm, (1, 0), root=root, size=comm.size)


def barrier(comm: Communicator | None = None) -> None:
    """Wait until every rank of the communicator has come here."""
    barrier_p.bind(carrier(), comm=resolve(comm).slot, site=call_site())
