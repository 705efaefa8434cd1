"""The functions of mpi4jax without tokens, whatever version the program was written for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mpigrad.compat.mpi4jax import operations
from mpigrad.compat.mpi4jax.operations import __all__ as __all__  # noqa: PLC0414


def _without_token(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, token=None, **kwargs)
        return result[0] if isinstance(result, tuple) else None

    return call


allgather = _without_token(operations.allgather)
allreduce = _without_token(operations.allreduce)
alltoall = _without_token(operations.alltoall)
barrier = _without_token(operations.barrier)
bcast = _without_token(operations.bcast)
gather = _without_token(operations.gather)
recv = _without_token(operations.recv)
reduce = _without_token(operations.reduce)
scan = _without_token(operations.scan)
scatter = _without_token(operations.scatter)
send = _without_token(operations.send)
sendrecv = _without_token(operations.sendrecv)
