"""Differentiable MPI operations: linear maps on the product space of the ranks' arrays."""

from mpigrad.operations.checks import assert_replicated, require
from mpigrad.operations.collectives import allreduce, barrier, bcast, gather, reduce, scatter
from mpigrad.operations.neighborhood import neighbor_alltoallv
from mpigrad.operations.point_to_point import recv, send, sendrecv

__all__ = [
    "allreduce",
    "assert_replicated",
    "barrier",
    "bcast",
    "gather",
    "neighbor_alltoallv",
    "recv",
    "reduce",
    "require",
    "scatter",
    "send",
    "sendrecv",
]
