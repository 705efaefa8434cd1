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
from mpigrad.operations.neighborhood import neighbor_alltoallv
from mpigrad.operations.point_to_point import recv, send, sendrecv
from mpigrad.operations.reductions import reduction
from mpigrad.operations.variable import (
    allgatherv,
    alltoallv,
    gatherv,
    reduce_scatterv,
    scatterv,
)

__all__ = [
    "allgather",
    "allgatherv",
    "allreduce",
    "alltoall",
    "alltoallv",
    "assert_replicated",
    "barrier",
    "bcast",
    "exscan",
    "gather",
    "gatherv",
    "neighbor_alltoallv",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatterv",
    "reduction",
    "require",
    "scan",
    "scatter",
    "scatterv",
    "send",
    "sendrecv",
]
