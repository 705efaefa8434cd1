"""A parameter server: rank 0 updates the parameters, and the other ranks compute gradients."""

from __future__ import annotations

import dataclasses
import operator
from typing import Literal

from mpigrad.communicator import Communicator
from mpigrad.training.replica import Replica
from mpigrad.training.server_loop import ServerLoop
from mpigrad.training.strategy import Run, Strategy
from mpigrad.training.synchronous import Synchronous
from mpigrad.training.worker_loop import WorkerLoop

__all__ = ["ParameterServer"]


@dataclasses.dataclass(frozen=True)
class ParameterServer(Strategy):
    """Update the parameters on rank 0 with the gradients of the other ranks, as they arrive.

    A worker computes a gradient at the last parameters that it received, sends it, and waits for
    new parameters. The server makes an update with the mean of all gradients that have arrived,
    weighted by samples. The *staleness* of a gradient is the count of updates between the
    parameters at which it was computed and the parameters that it changes. No staleness exceeds
    the bound: the server waits for workers whose gradient would become too old by the next update.

    On one rank this strategy is `Synchronous()`.

    Attributes
    ----------
    staleness
        The bound, 0 or more. With 0 the run has the same bits as `Synchronous` on as many ranks as
        there are workers. With more than 0 two runs differ.
    scale_by_staleness
        True to divide each gradient by 1 + its staleness (after Zhang, Gupta, Lian and Liu,
        "Staleness-aware async-SGD for distributed deep learning", 2016).
    on_error
        The action if a worker's batch fails. "raise": the training ends on all ranks with that
        error. "drop": the server prints the error, and the run continues without that worker as
        long as another worker is left.

    Raises
    ------
    ValueError, TypeError
        If an attribute is out of range.

    Notes
    -----
    The bound is that of Ho et al., "More effective distributed ML via a stale synchronous parallel
    parameter server", 2013.

    Examples
    --------
    >>> import numpy as np
    >>> import optax
    >>> from mpigrad import training
    >>> x = np.linspace(0, 1, 32)
    >>> loss = lambda params, x, y: ((params["a"] * x - y) ** 2).mean()
    >>> strategy = training.ParameterServer(staleness=2)
    >>> trainer = training.trainer({"a": np.float32(0.0)}, optax.sgd(1.0), loss, strategy)
    >>> history = trainer.run(training.Batches(32, 8, epochs=20, take=lambda i: (x[i], 3 * x[i])))
    >>> print(len(history.records), round(float(trainer.model["a"]), 3))
    80 3.0
    """

    staleness: int = 0
    scale_by_staleness: bool = False
    on_error: Literal["raise", "drop"] = "raise"

    def __post_init__(self) -> None:
        if operator.index(self.staleness) < 0:
            raise ValueError(
                f"ParameterServer: staleness must not be negative, got {self.staleness}. Pass 0 or "
                "a larger bound."
            )
        if self.on_error not in ("raise", "drop"):
            raise ValueError(
                f'ParameterServer: on_error must be "raise" or "drop", got {self.on_error!r}. Pass '
                "one of these."
            )

    def start(self, replica: Replica, comm: Communicator) -> Run:
        if comm.size == 1:
            return Synchronous().start(replica, comm)
        if comm.rank > 0:
            return WorkerLoop(replica, comm, drop=self.on_error == "drop")
        return ServerLoop(
            replica,
            comm,
            bound=operator.index(self.staleness),
            scale=self.scale_by_staleness,
            drop=self.on_error == "drop",
        )
