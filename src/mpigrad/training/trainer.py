"""The verb `trainer`: a model, an optimizer and a loss, trained by all ranks together."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from mpigrad.checkpoint import Checkpoint
from mpigrad.communicator import Communicator
from mpigrad.training.history import History, Record
from mpigrad.training.strategy import Strategy
from mpigrad.training.synchronous import Synchronous

__all__ = ["Trainer", "trainer"]


def trainer(
    model: Any,
    optimizer: Any = None,
    loss: Callable[..., Any] | None = None,
    strategy: Strategy = Synchronous(),  # noqa: B008 (frozen)
    *,
    weight: Callable[..., float] | None = None,
    comm: Communicator | None = None,
) -> Trainer:
    """Make the replicas of all ranks equal, and begin to train them (collective).

    Parameters
    ----------
    model
        A `torch.nn.Module`; a pytree of JAX's or NumPy's floating-point arrays; or a `Replica` of
        your own, with optimizer and loss None.
    optimizer
        For a module a `torch.optim.Optimizer` over its parameters; for a pytree an
        `optax.GradientTransformation`.
    loss
        loss(model, *batch) -> the mean over the batch's samples: a real scalar.
    strategy
        `Synchronous(...)`, `LocalSGD(...)` or `ParameterServer(...)`.
    weight
        weight(*batch) -> what a batch counts in means over ranks; if not given, the length of the
        leading axis of its first array.
    comm
        The ranks; all of them if not given.

    Raises
    ------
    TypeError, ValueError
        On every rank: arguments that do not fit, or parameters whose names, shapes or dtypes
        differ between ranks (the first that does, and the rank, are named).

    Notes
    -----
    All ranks begin with rank 0's parameters, buffers and optimizer state. Where others were
    different, rank 0 says so once.
    """
    raise NotImplementedError


class Trainer:
    """A training of one model on all ranks; `trainer` makes it.

    Attributes
    ----------
    comm
        The ranks, with a message space of their own.
    shard
        (index, count): which part of each global batch this rank takes, for `Batches` or for a
        loader of your own; count is 0 on a rank that takes none (a parameter server).
    history
        The `History` so far.
    """

    comm: Communicator
    shard: tuple[int, int]
    history: History

    @property
    def model(self) -> Any:
        """The module, or a copy of the parameters' pytree; trained as far as `history` says."""
        raise NotImplementedError

    def run(
        self,
        batches: Iterable[Any],
        *,
        steps: int | None = None,
        callback: Callable[[Record], Any] | None = None,
        checkpoint: Checkpoint | None = None,
        progress: bool = False,
    ) -> History:
        """Train until the batches end on all ranks (collective).

        Parameters
        ----------
        batches
            `Batches(...)`, or any iterable of tuples that the loss takes as `*batch` (what is no
            tuple or list is its only argument). Ranks may have different numbers of batches, and
            batches without samples: they take part with weight 0.
        steps
            End after this many updates, those of earlier runs included; equal on all ranks.
        callback
            record -> whether to end, called after each update; all ranks end where one's says so.
            Under a parameter server it is called on the server alone.
        checkpoint
            A `mpigrad.checkpoint.Checkpoint`: the state is saved as it says and at the end, and a
            run that finds one goes on from there.
        progress
            Show a line that says how far it has come.

        Returns
        -------
        The `History` of all updates so far.

        Raises
        ------
        StepError
            Another rank has failed (it raises its own error).
        FloatingPointError
            On every rank: the gradient has a number that is not finite; the parameter and the
            ranks are named, and the parameters are those before the step.
        """
        raise NotImplementedError

    def step(self, *batch: Any) -> Record:
        """One update (collective), where the strategy goes step by step; see `run`."""
        raise NotImplementedError

    def save(self, directory: str | os.PathLike[str]) -> pathlib.Path:
        """Write all that is needed to go on, bit for bit, with `resume` (collective).

        Model, optimizer, the position in `Batches` and each rank's generator of PyTorch; see
        `mpigrad.checkpoint.Store`.
        """
        raise NotImplementedError

    def resume(self, directory: str | os.PathLike[str]) -> bool:
        """Go on from the newest save in a directory (collective); False where there is none.

        The next `run` with a `Batches` goes on at its saved position. On another number of ranks
        the training goes on to rounding, with random generators as they are.

        Raises
        ------
        ValueError
            On every rank: the save is of another model, or of another strategy.
        """
        raise NotImplementedError
