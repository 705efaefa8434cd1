"""allreduce(SUM) with the adjoint of mpi4jax, which is the identity."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from mpi4py import MPI

from mpigrad.communicator import Communicator
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir
from mpigrad.operations.carrier import opaque_zero
from mpigrad.operations.collectives import allreduce
from mpigrad.operations.primitive import linear_map
from mpigrad.operations.pytree_packing import bind_packed
from mpigrad.operations.reductions import check_op
from mpigrad.runtime.native import NO_ROOT, SUM

__all__ = ["ADJOINTS", "sum_over_ranks"]

ADJOINTS = "MPIGRAD_MPI4JAX_ADJOINTS"
_CHOICES = ("mpi4jax", "exact")


def _are_exact() -> bool:
    choice = os.environ.get(ADJOINTS) or "mpi4jax"
    if choice not in _CHOICES:
        raise ValueError(
            f"mpi4jax.allreduce: {ADJOINTS} must be {' or '.join(_CHOICES)}, got {choice!r}. "
            "Correct the environment variable, or remove it."
        )
    return choice == "exact"


def sum_over_ranks(x: Any, comm: Communicator) -> Any:
    """Sum the `x` of all ranks, with the adjoint that `MPIGRAD_MPI4JAX_ADJOINTS` selects.

    Parameters
    ----------
    x
        Array, with the same shape and dtype on every rank.
    comm
        The communicator.

    Returns
    -------
    The sum. Its adjoint is the identity, or with MPIGRAD_MPI4JAX_ADJOINTS=exact the sum again.
    The adjoint of the identity is the sum.

    Raises
    ------
    TypeError
        If MPI has no sum for the dtype of `x`.
    """
    if _are_exact():
        return allreduce(x, comm=comm)
    check_op("mpi4jax.allreduce", x, MPI.SUM)
    return bind_packed(_sum_p, x, comm, op=SUM)


_sum_p: Primitive = linear_map(
    "allreduce_of_mpi4jax",
    target="mpigrad_allreduce",
    result=lambda x, **_: ShapedArray(x.shape, x.dtype),
    in_place=True,
    attributes=lambda avals, params: {**params, "root": NO_ROOT},
    transpose=lambda ct, x, a, **params: _identity_p.bind(ct, a, **params),
)

# ---- its adjoint: (x, carrier) -> x, without a message, and with the sum as its own adjoint ----

_identity_p = Primitive("mpi4jax_adjoint_of_allreduce")


def _identity(x: Any, a: Any, **params: Any) -> Any:
    return x


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (x, a), (tx, ta) = primals, tangents
    if type(tx) is ad.Zero and type(ta) is ad.Zero:
        return _identity_p.bind(x, a, **params), ad.Zero(tx.aval)
    if type(tx) is ad.Zero:  # inactive on this rank alone
        tx = opaque_zero(ta, x.aval)
    return _identity_p.bind(x, a, **params), _identity_p.bind(tx, a, **params)


def _transpose(ct: Any, x: Any, a: Any, **params: Any) -> Any:
    ct = ad.instantiate_zeros(ct)
    return [_sum_p.bind(ct, a, **{**params, "site": abs(params["site"])})[0], None]


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    (x, a), (dx, da) = args, dims
    return _identity_p.bind(x, a if da is None else a.sum(), **params), dx


_identity_p.def_impl(_identity)
_identity_p.def_abstract_eval(lambda x, a, **params: ShapedArray(x.shape, np.dtype(x.dtype)))
mlir.register_lowering(_identity_p, mlir.lower_fun(_identity, multiple_results=False))
ad.primitive_jvps[_identity_p] = _jvp
ad.primitive_transposes[_identity_p] = _transpose
batching.primitive_batchers[_identity_p] = _batch
