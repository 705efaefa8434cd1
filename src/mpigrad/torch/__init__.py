"""The operations of mpigrad for PyTorch: messages that autograd differentiates.

Functions have the names and arguments of mpigrad's operations, and their values are tensors.
`loss.backward()` on every rank differentiates the sum of the ranks' losses.

Examples
--------
>>> import torch
>>> import mpigrad.torch as mg
>>> x = torch.tensor(2.0, requires_grad=True)
>>> loss = mg.allreduce(x) ** 2
>>> loss.backward()
>>> print(x.grad)
tensor(4.)
"""

# pyright: reportMissingImports=false
try:
    import torch as _torch
except ImportError as error:
    raise ImportError(
        "mpigrad.torch: PyTorch is not installed. Install it by pip install 'mpigrad[torch]'."
    ) from error

import os as _os

from mpigrad.communicator import Communicator
from mpigrad.extend import pass_over as _pass_over
from mpigrad.torch.chain import forget_messages, messages
from mpigrad.torch.chain import join_backward as _join_backward
from mpigrad.torch.operations import (
    allgather,
    allgatherv,
    allreduce,
    alltoall,
    alltoallv,
    assert_replicated,
    barrier,
    bcast,
    custom_operation,
    exscan,
    gather,
    gatherv,
    irecv,
    isend,
    neighbor_alltoallv,
    one_sided,
    recv,
    recv_with_status,
    reduce,
    reduce_scatter,
    reduce_scatterv,
    reduction,
    scan,
    scatter,
    scatterv,
    send,
    sendrecv,
    wait,
    wait_with_status,
    waitall,
)
from mpigrad.torch.verify import dot_test, gradcheck, gradgradcheck

_pass_over(_os.path.dirname(str(_torch.__file__)))
_join_backward()

__all__ = [
    "Communicator",
    "allgather",
    "allgatherv",
    "allreduce",
    "alltoall",
    "alltoallv",
    "assert_replicated",
    "barrier",
    "bcast",
    "custom_operation",
    "dot_test",
    "exscan",
    "forget_messages",
    "gather",
    "gatherv",
    "gradcheck",
    "gradgradcheck",
    "irecv",
    "isend",
    "messages",
    "neighbor_alltoallv",
    "one_sided",
    "recv",
    "recv_with_status",
    "reduce",
    "reduce_scatter",
    "reduce_scatterv",
    "reduction",
    "scan",
    "scatter",
    "scatterv",
    "send",
    "sendrecv",
    "wait",
    "wait_with_status",
    "waitall",
]
