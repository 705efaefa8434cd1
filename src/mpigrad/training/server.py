"""A parameter server: rank 0 has the parameters and the optimizer, the other ranks gradients."""

from __future__ import annotations

import dataclasses
import operator
from typing import Literal

from mpigrad.communicator import Communicator
from mpigrad.training.replica import Replica
from mpigrad.training.server_loop import Serving
from mpigrad.training.strategy import Run, Strategy
from mpigrad.training.synchronous import Synchronous
from mpigrad.training.worker_loop import Working

__all__ = ["ParameterServer"]


@dataclasses.dataclass(frozen=True)
class ParameterServer(Strategy):
    """Rank 0 updates the parameters by the gradients of the other ranks, as they arrive.

    A worker computes a gradient at the parameters that it was given last, sends it, and waits for
    new ones. The server makes an update by all gradients that are there: their mean, weighted by
    samples. The *staleness* of a gradient is the number of updates between the parameters that it
    was computed at and those that it changes. No gradient is staler than the bound: the server
    waits for workers whose gradient the next update would make too old.

    On one rank it is `Synchronous()`.

    Attributes
    ----------
    staleness
        The bound, 0 or more. With 0 the run is that of `Synchronous` on as many ranks as there are
        workers, bit for bit; with more than 0 no two runs are equal.
    scale_by_staleness
        Divide each gradient by 1 + its staleness, so that what is old changes less (after Zhang,
        Gupta, Lian and Liu, "Staleness-aware async-SGD for distributed deep learning", 2016).
    on_error
        When a worker's batch fails: "raise", the training ends on all ranks with the cause; "drop",
        the server says so, and this run goes on without that worker while there is another.

    Raises
    ------
    ValueError, TypeError
        Settings that are none of these.

    Notes
    -----
    The bound is that of Ho et al., "More effective distributed ML via a stale synchronous parallel
    parameter server", 2013.
    """

    staleness: int = 0
    scale_by_staleness: bool = False
    on_error: Literal["raise", "drop"] = "raise"

    def __post_init__(self) -> None:
        if operator.index(self.staleness) < 0:
            raise ValueError(f"ParameterServer: staleness={self.staleness} must be 0 or more")
        if self.on_error not in ("raise", "drop"):
            raise ValueError(
                f'ParameterServer: on_error={self.on_error!r} is not "raise" or "drop"'
            )

    def start(self, replica: Replica, comm: Communicator) -> Run:
        if comm.size == 1:
            return Synchronous().start(replica, comm)
        if comm.rank > 0:
            return Working(replica, comm, drop=self.on_error == "drop")
        return Serving(
            replica,
            comm,
            bound=operator.index(self.staleness),
            scale=self.scale_by_staleness,
            drop=self.on_error == "drop",
        )
