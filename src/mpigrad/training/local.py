"""Local SGD: ranks train on their own, and average their parameters now and then."""

from __future__ import annotations

import dataclasses

from mpigrad.communicator import Communicator
from mpigrad.training.replica import Replica
from mpigrad.training.strategy import Run, Strategy

__all__ = ["LocalSGD"]


@dataclasses.dataclass(frozen=True)
class LocalSGD(Strategy):
    """Every rank makes steps of its own; parameters are averaged (weighted by samples) now and then.

    Attributes
    ----------
    every
        Steps between averages.
    """

    every: int = 8

    def start(self, replica: Replica, comm: Communicator) -> Run:
        raise NotImplementedError
