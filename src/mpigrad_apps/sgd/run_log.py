"""The course of a training: what is noted of its steps and of its epochs."""

from __future__ import annotations

import dataclasses

__all__ = ["EpochRecord", "RunLog", "StepRecord"]


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One update of the parameters; of local SGD, one mean of them and the steps before it.

    `samples` counts all that were met so far, by all ranks; `seconds` is the wall time since the
    first update, tests left out; `loss` is the mean over the update's samples.
    """

    step: int
    loss: float
    samples: float
    seconds: float
    staleness: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """What the held-out samples say after an epoch (0: before the first), at so many samples and
    seconds.
    """

    epoch: int
    samples: float
    seconds: float
    loss: float | None = None
    score: float | None = None


@dataclasses.dataclass(frozen=True)
class RunLog:
    """One training, and how it ended: `stopped`, where somebody asked for it.

    `bound` is the largest staleness under a parameter server, else None.
    """

    name: str
    steps: tuple[StepRecord, ...]
    epochs: tuple[EpochRecord, ...]
    ending: str
    stopped: bool = False
    bound: int | None = None
