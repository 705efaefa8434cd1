"""What a training notes of each update."""

from __future__ import annotations

import collections
import dataclasses
import math

__all__ = ["History", "Record", "Span"]


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end` (seconds of time.perf_counter), for a timeline."""

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Record:
    """One update of the parameters.

    Attributes
    ----------
    step
        Updates so far, this one included: 1, 2, ...
    loss
        Mean over the samples of all ranks, before the update.
    samples
        Sum of the weights in this update: samples, unless the trainer was given another weight.
    seconds
        Since the start, those of earlier runs that were saved included; this rank's clock.
    gradient_norm
        Two-norm of the mean gradient over all parameters, before clipping; NaN where a strategy
        does not know it.
    communication
        Seconds of this step that this rank spent on messages and on adding what they brought.
    exposed
        The part of `communication` after its own gradient was computed: what overlap has not
        hidden.
    staleness
        Of each gradient in this update, the updates since its parameters were read; empty where
        all are 0.
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
    """All updates of a training, those of earlier runs that were saved included.

    Attributes
    ----------
    records
        In the order of their steps. Under a parameter server the server's; other ranks get them at
        the end.
    asked_to_end
        With a checkpoint, a signal asked for the end before the batches had ended.
    """

    records: tuple[Record, ...]
    asked_to_end: bool = False

    @property
    def staleness(self) -> dict[int, int]:
        """How many gradients had each staleness."""
        counts = collections.Counter(s for record in self.records for s in record.staleness)
        return dict(sorted(counts.items()))
