"""The history of a training, and means of metrics over ranks."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import jax

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve

__all__ = [
    "History",
    "Span",
    "StepRecord",
    "mean",
]

# ---- The history of a training: one record for each update ----


@dataclasses.dataclass(frozen=True)
class Span:
    """An interval of a step, for a timeline.

    Attributes
    ----------
    name
        The activity, for instance "gradient" or "update".
    start, end
        Seconds of `time.perf_counter`.

    Examples
    --------
    >>> from mpigrad import training
    >>> span = training.Span("gradient", 1.0, 1.5)
    >>> print(span.name, span.end - span.start)
    gradient 0.5
    """

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """The record of one update of the parameters.

    Attributes
    ----------
    step
        Count of updates so far, including this one: 1, 2, ...
    loss
        Mean over the samples of all ranks, before the update.
    samples
        Sum of the weights in this update, which is the count of samples unless the trainer was
        given another weight.
    seconds
        Time since the start by this rank's clock. It includes earlier runs, but not the time
        between runs.
    gradient_norm
        Two-norm of the mean gradient over all parameters, before clipping. NaN if the strategy
        does not compute it.
    communication
        Seconds of this step that this rank spent on messages and on adding received numbers.
    exposed
        The part of `communication` after this rank's own gradient was computed, which overlap
        does not hide.
    staleness
        For each gradient in this update, the count of updates since its parameters were read.
        Empty if all are 0.

    Examples
    --------
    >>> from mpigrad import training
    >>> training.StepRecord(step=1, loss=0.5, samples=64.0, seconds=0.1).exposed
    0.0
    """

    step: int
    loss: float
    samples: float
    seconds: float
    gradient_norm: float = math.nan
    communication: float = 0.0
    exposed: float = 0.0
    staleness: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class History:
    """All updates of a training, including saved updates of earlier runs.

    Attributes
    ----------
    records
        The records in the order of steps. With a parameter server, the server has them during the
        run, and the other ranks get them at the end.
    interrupted
        True if a signal ended a run with a checkpoint before its batches ended.

    Examples
    --------
    >>> from mpigrad import training
    >>> record = training.StepRecord(1, 0.5, 64.0, 0.1, staleness=(0, 1))
    >>> history = training.History((record,))
    >>> history.interrupted, history.staleness
    (False, {0: 1, 1: 1})
    """

    records: tuple[StepRecord, ...]
    interrupted: bool = False

    @property
    def staleness(self) -> dict[int, int]:
        """The count of gradients for each staleness."""
        counts = collections.Counter(s for record in self.records for s in record.staleness)
        return dict(sorted(counts.items()))


# ---- Means of metrics over ranks ----


def mean(values: Any, weight: float, comm: Communicator | None = None) -> Any:
    """Return the weighted mean over ranks of a pytree of numbers (collective).

    Parameters
    ----------
    values
        A number, or a pytree of numbers such as {"loss": ..., "accuracy": ...}, with the means
        over this rank's samples. They are ignored if the weight is 0, and may then be NaN.
    weight
        The weight of this rank, usually its count of samples.
    comm
        The communicator (default: the default communicator).

    Returns
    -------
    A tree of floats, the same on all ranks bit for bit.

    Raises
    ------
    ValueError, TypeError
        On every rank, if a weight is negative or not finite, if all weights are zero, or if the
        structures of the trees differ between ranks.

    Examples
    --------
    >>> from mpigrad import training
    >>> training.mean({"loss": 0.5}, weight=100)
    {'loss': 0.5}
    """
    comm = resolve(comm)
    leaves: list[float] = []
    with raise_on_all_ranks(comm):
        leaves = [float(leaf) for leaf in jax.tree.leaves(values)]
        structure = jax.tree.structure(values)
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"mean: weight must be finite and not negative, got {weight} on rank {comm.rank}. "
                "Pass this rank's count of samples."
            )
    everybody = comm.mpi.allgather((float(weight), str(structure), leaves))
    if any(text != everybody[0][1] for _, text, _ in everybody):
        rank = next(r for r, report in enumerate(everybody) if report[1] != everybody[0][1])
        raise ValueError(
            f"mean: the structure of values must be the same on all ranks, got {everybody[0][1]} "
            f"on rank 0 and {everybody[rank][1]} on rank {rank}. Pass the same structure on all "
            "ranks."
        )
    total = math.fsum(w for w, _, _ in everybody)
    if not total > 0:
        raise ValueError(
            "mean: the weights of all ranks are zero. Pass a positive weight on a rank at least."
        )
    means = [
        math.fsum(w * numbers[i] for w, _, numbers in everybody if w > 0) / total
        for i in range(len(leaves))
    ]
    return jax.tree.unflatten(structure, means)
