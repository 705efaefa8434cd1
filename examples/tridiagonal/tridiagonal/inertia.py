"""The number of negative eigenvalues: a primitive with messages and a rule of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import mpigrad as mg
from mpigrad.extend import Activity, call_site, carrier, primitive, without_carriers
from tridiagonal.system import Tridiagonal

__all__ = ["count_negative"]


def count_negative(A: Tridiagonal, shift: Any, comm: mg.Communicator | None = None) -> jax.Array:
    """Return how many eigenvalues of a symmetric matrix are below `shift` (collective).

    By Sylvester's law of inertia it is the number of negative pivots of A - shift. The rows of a
    rank follow those of the rank before, so the last pivot is passed on from rank to rank. The
    count is a step function: its derivative is zero, and no message is sent for it.

    Parameters
    ----------
    A
        This rank's rows. Only `lower` and `diagonal` are read.
    shift
        Number, the same on all ranks.
    comm
        The communicator. Default: the default communicator.
    """
    comm = mg.default_communicator() if comm is None else comm
    operands = A.lower, A.diagonal, jnp.asarray(shift, A.diagonal.dtype)
    (count,) = inertia_p.bind(*operands, carrier(), comm=comm, site=call_site())
    return count


def _run(
    lower: Any, diagonal: Any, shift: Any, a: Any, *, comm: mg.Communicator, site: int
) -> list[Any]:
    def next_pivot(pivot: Any, row: Any) -> Any:
        below, on = row
        pivot = on - shift - below**2 / pivot
        return pivot, pivot < 0

    pivot = jnp.inf * jnp.ones_like(shift)
    with without_carriers():  # these messages carry values only
        if comm.rank > 0:
            pivot = mg.recv(pivot, comm.rank - 1, comm=comm)
        pivot, negative = jax.lax.scan(next_pivot, pivot, (lower, diagonal))
        if comm.rank < comm.size - 1:
            mg.send(pivot, comm.rank + 1, comm=comm)
        return [mg.allreduce(jnp.sum(negative, dtype=jnp.int32), comm=comm)]


def _differentiate(
    operands: Sequence[Any], params: dict[str, Any], activity: Activity
) -> tuple[list[Any], Any, Any]:
    return inertia_p.bind(*operands, **params), (), lambda residuals, tangents: [None]


inertia_p = primitive(
    "tridiagonal_inertia",
    shapes=lambda *operands, **params: [jax.ShapeDtypeStruct((), jnp.int32)],
    run=_run,
    differentiate=_differentiate,
    undifferentiated=(0,),
    batch="map",
)
