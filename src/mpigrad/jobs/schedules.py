"""Schedules: rules that give each block of jobs to a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Dynamic", "Schedule", "Static", "Weighted"]


@dataclass(frozen=True)
class Static:
    """Give each rank a contiguous stripe of blocks, in the order of ranks.

    If the count of blocks is not a multiple of the count of ranks, the first ranks get one block
    more: 4 ranks get 3, 3, 2, 2 of 10 blocks, and 1, 1, 1, 0 of 3 blocks.

    Examples
    --------
    >>> from mpigrad import jobs
    >>> jobs.Static().owners([[0], [1], [2], [3], [4]], 2).tolist()
    [0, 0, 0, 1, 1]
    """

    def owners(self, blocks: Sequence[np.ndarray], ranks: int) -> np.ndarray:
        """Return the rank of each block; `blocks` has the job ids of each block."""
        each, more = divmod(len(blocks), ranks)
        return np.repeat(np.arange(ranks), [each + (r < more) for r in range(ranks)])


@dataclass(frozen=True)
class Weighted:
    """Give each block, in descending order of cost, to the rank with the smallest load so far.

    Parameters
    ----------
    costs
        The cost of each job in any unit, for instance the seconds that `Pool.measure` returns.

    Raises
    ------
    ValueError
        If `costs` is not a vector of finite non-negative numbers, or, in `Pool.put`, if its length
        is not the count of items.

    Examples
    --------
    >>> from mpigrad import jobs
    >>> schedule = jobs.Weighted([1.0, 1.0, 4.0, 1.0])
    >>> schedule.owners([[0], [1], [2], [3]], 2).tolist()  # rank 0 has the job of cost 4
    [1, 1, 0, 1]
    """

    costs: tuple[float, ...]

    def __init__(self, costs: Any) -> None:
        values = np.asarray(costs, float)
        if values.ndim != 1 or not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(
                f"Weighted: expected a vector of finite numbers >= 0, one for each job, got "
                f"shape {values.shape} with {_worst(values)}. Pass such costs."
            )
        object.__setattr__(self, "costs", tuple(values.tolist()))

    def owners(self, blocks: Sequence[np.ndarray], ranks: int) -> np.ndarray:
        """Return the rank of each block; `blocks` has the job ids of each block."""
        jobs = sum(len(block) for block in blocks)
        if len(self.costs) != jobs:
            raise ValueError(
                f"Weighted: expected one cost for each job, got {len(self.costs)} costs for "
                f"{jobs} jobs. Pass {jobs} costs."
            )
        costs = np.asarray(self.costs)
        weights = np.array([costs[block].sum() for block in blocks])
        owners = np.zeros(len(blocks), int)
        loads = [(0.0, 0)] * ranks  # (cost, blocks): among equal costs, the rank with fewer blocks
        for i in np.argsort(-weights, kind="stable"):
            owners[i] = rank = loads.index(min(loads))
            cost, count = loads[rank]
            loads[rank] = (cost + float(weights[i]), count + 1)
        return owners


@dataclass(frozen=True)
class Dynamic:
    """Give the next block to whichever rank is free, while the program runs.

    This is for jobs whose costs are unknown and differ widely. Every rank keeps all items, and
    asks rank 0 for each block.

    Examples
    --------
    >>> from mpigrad import jobs
    >>> with jobs.pool(schedule=jobs.Dynamic()) as pool:
    ...     data = pool.put([1.0, 2.0, 3.0])
    ...     f = pool.sum(lambda params, item_params, item: params * item, data)
    ...     print(data.dynamic, f(2.0))
    True 12.0
    """

    def owners(self, blocks: Sequence[np.ndarray], ranks: int) -> np.ndarray:
        """Return the ranks of `Static`, which hold if no queue decides."""
        return Static().owners(blocks, ranks)


Schedule = Static | Weighted | Dynamic


def _worst(values: np.ndarray) -> str:
    bad = values[~(np.isfinite(values) & (values >= 0))]
    return f"the value {bad.flat[0]}" if bad.size else f"{values.ndim} axes"
