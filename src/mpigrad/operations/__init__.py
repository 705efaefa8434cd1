"""Differentiable MPI operations: linear maps on the product space of the ranks' arrays."""

from mpigrad.operations.checks import assert_replicated, require
from mpigrad.operations.collectives import allreduce, barrier, bcast, gather, reduce, scatter
from mpigrad.operations.custom import custom_operation
from mpigrad.operations.neighborhood import neighbor_alltoallv
from mpigrad.operations.nonblocking import irecv, isend, wait, waitall
from mpigrad.operations.one_sided import one_sided
from mpigrad.operations.point_to_point import recv, recv_with_status, send, sendrecv

__all__ = [
    "allreduce",
    "assert_replicated",
    "barrier",
    "bcast",
    "custom_operation",
    "gather",
    "irecv",
    "isend",
    "neighbor_alltoallv",
    "one_sided",
    "recv",
    "recv_with_status",
    "reduce",
    "require",
    "scatter",
    "send",
    "sendrecv",
    "wait",
    "waitall",
]
