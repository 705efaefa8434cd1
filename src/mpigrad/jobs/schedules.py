"""Schedules: which rank does which block of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Dynamic", "Schedule", "Static", "Weighted"]


@dataclass(frozen=True)
class Static:
    """Blocks in stripes: rank 0 the first ones, rank 1 the next, the first ranks one more.

    10 blocks on 4 ranks are shared out as 3, 3, 2, 2, and 3 blocks as 1, 1, 1, 0.
    """

    def owners(self, blocks: Sequence[np.ndarray], ranks: int) -> np.ndarray:
        """The rank of each block; `blocks` are the job numbers in each."""
        each, more = divmod(len(blocks), ranks)
        return np.repeat(np.arange(ranks), [each + (r < more) for r in range(ranks)])


@dataclass(frozen=True)
class Weighted:
    """The costliest block first, always to the rank that has least to do so far.

    Parameters
    ----------
    costs
        The cost of each job in any unit, such as the seconds that `Pool.measure` returns.
    """

    costs: tuple[float, ...]

    def __init__(self, costs: Any) -> None:
        values = np.asarray(costs, float)
        if values.ndim != 1 or not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(
                f"Weighted: costs of shape {values.shape} must be finite numbers >= 0, "
                "one for each job"
            )
        object.__setattr__(self, "costs", tuple(values.tolist()))

    def owners(self, blocks: Sequence[np.ndarray], ranks: int) -> np.ndarray:
        """The rank of each block; `blocks` are the job numbers in each."""
        jobs = sum(len(block) for block in blocks)
        if len(self.costs) != jobs:
            raise ValueError(f"Weighted: {len(self.costs)} costs for {jobs} jobs")
        costs = np.asarray(self.costs)
        weights = np.array([costs[block].sum() for block in blocks])
        owners = np.zeros(len(blocks), int)
        loads = [(0.0, 0)] * ranks  # of equal costs, whoever has fewer blocks
        for i in np.argsort(-weights, kind="stable"):
            owners[i] = rank = loads.index(min(loads))
            cost, count = loads[rank]
            loads[rank] = (cost + float(weights[i]), count + 1)
        return owners


@dataclass(frozen=True)
class Dynamic:
    """Whoever is free takes the next block, while the program runs.

    For jobs whose cost is unknown and differs widely. Every rank keeps all records.
    """

    def owners(self, blocks: Sequence[np.ndarray], ranks: int) -> np.ndarray:
        """The rank of each block where no queue decides: as `Static` has it."""
        return Static().owners(blocks, ranks)


Schedule = Static | Weighted | Dynamic
