"""Synchronous training: every update is that of one big batch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mpigrad.communicator import Communicator
from mpigrad.training.replica import Replica
from mpigrad.training.strategy import Run, Strategy

__all__ = ["Synchronous"]


@dataclasses.dataclass(frozen=True)
class Synchronous(Strategy):
    """All ranks take each step together, along the gradient of the mean loss over all samples.

    Attributes
    ----------
    bucket_mib, first_bucket_mib
        Gradients travel in buckets of this size (MiB), the first, which is ready first, smaller.
    overlap
        Send buckets while the backward pass goes on.
    compression
        Send gradients in this dtype; they are added in their own.
    accumulate
        Parts that a batch is computed in, one after the other, for lack of memory.
    clip
        Mean gradients of a larger two-norm are made shorter.
    """

    bucket_mib: float = 25.0
    first_bucket_mib: float = 1.0
    overlap: bool = True
    compression: Literal["float16", "bfloat16"] | None = None
    accumulate: int = 1
    clip: float | None = None

    def start(self, replica: Replica, comm: Communicator) -> Run:
        raise NotImplementedError
