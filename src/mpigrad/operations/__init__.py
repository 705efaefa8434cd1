"""Differentiable MPI operations: linear maps on the product space of the ranks' arrays."""

from mpigrad.operations.checks import assert_replicated, require
from mpigrad.operations.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    bcast,
    exscan,
    gather,
    reduce,
    reduce_scatter,
    scan,
    scatter,
)
from mpigrad.operations.custom import custom_operation
from mpigrad.operations.jit import jit
from mpigrad.operations.nonblocking import Request, irecv, isend, wait, wait_with_status, waitall
from mpigrad.operations.norms import max_norm, rms_norm
from mpigrad.operations.one_sided import one_sided
from mpigrad.operations.point_to_point import recv, recv_with_status, send
from mpigrad.operations.reduce_operators import Reduction, reduction
from mpigrad.operations.sendrecv import sendrecv
from mpigrad.operations.v_collectives import (
    allgatherv,
    alltoallv,
    gatherv,
    neighbor_alltoallv,
    reduce_scatterv,
    scatterv,
)

__all__ = [
    "Reduction",
    "Request",
    "allgather",
    "allgatherv",
    "allreduce",
    "alltoall",
    "alltoallv",
    "assert_replicated",
    "barrier",
    "bcast",
    "custom_operation",
    "exscan",
    "gather",
    "gatherv",
    "irecv",
    "isend",
    "jit",
    "max_norm",
    "neighbor_alltoallv",
    "one_sided",
    "recv",
    "recv_with_status",
    "reduce",
    "reduce_scatter",
    "reduce_scatterv",
    "reduction",
    "require",
    "rms_norm",
    "scan",
    "scatter",
    "scatterv",
    "send",
    "sendrecv",
    "wait",
    "wait_with_status",
    "waitall",
]
