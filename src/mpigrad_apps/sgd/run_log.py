"""The log of a training: records of its steps and epochs."""

from __future__ import annotations

import dataclasses

__all__ = ["EpochRecord", "RunLog", "StepRecord"]


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One update of the parameters. In local SGD, one averaging and the steps before it.

    Attributes
    ----------
    step
        Index of the step.
    loss
        Mean loss over the samples of the update.
    samples
        Number of samples that all ranks have used so far.
    seconds
        Wall time since the first update, without tests.
    staleness
        Staleness of each gradient under a parameter server.
    """

    step: int
    loss: float
    samples: float
    seconds: float
    staleness: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """The results for the held-out samples after an epoch. Epoch 0 is before the first step.

    `samples` and `seconds` are those of the last step.
    """

    epoch: int
    samples: float
    seconds: float
    loss: float | None = None
    score: float | None = None


@dataclasses.dataclass(frozen=True)
class RunLog:
    """The log of one training.

    Attributes
    ----------
    name
        Name of the training and of its directory.
    steps, epochs
        The records.
    ending
        The reason why the training ended.
    stopped
        True if the user or the system asked the training to stop.
    bound
        The largest allowed staleness under a parameter server, else None.
    """

    name: str
    steps: tuple[StepRecord, ...]
    epochs: tuple[EpochRecord, ...]
    ending: str
    stopped: bool = False
    bound: int | None = None
