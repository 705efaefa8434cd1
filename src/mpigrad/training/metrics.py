"""Means of metrics over ranks."""

from __future__ import annotations

import math
from typing import Any

import jax

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve

__all__ = ["mean"]


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
