"""Numbers of all ranks as one."""

from __future__ import annotations

from typing import Any

from mpigrad.communicator import Communicator

__all__ = ["mean"]


def mean(values: Any, weight: float, comm: Communicator | None = None) -> Any:
    """The mean over ranks of a pytree of numbers, each rank's weighted (collective).

    Parameters
    ----------
    values
        A number, or a pytree of them, such as {"loss": ..., "accuracy": ...}, means over this
        rank's samples; where the weight is 0 they may be anything (NaN, of no samples).
    weight
        Usually this rank's number of samples.
    comm
        The ranks; all of them if not given.

    Returns
    -------
    A tree of floats, equal on all ranks bit for bit: ranks are added in their order.

    Raises
    ------
    ValueError
        On every rank: weights are negative, or all are zero; or trees differ.
    """
    raise NotImplementedError
