"""Numbers of all ranks as one."""

from __future__ import annotations

import math
from typing import Any

import jax

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve

__all__ = ["mean"]


def mean(values: Any, weight: float, comm: Communicator | None = None) -> Any:
    """The mean over ranks of a pytree of numbers, each rank's weighted (collective).

    Parameters
    ----------
    values
        A number, or a pytree of them, such as {"loss": ..., "accuracy": ...}: means over this
        rank's samples. Where the weight is 0 they may be anything (NaN, of no samples).
    weight
        Usually this rank's number of samples.
    comm
        The ranks; all of them if not given.

    Returns
    -------
    A tree of floats, equal on all ranks bit for bit.

    Raises
    ------
    ValueError, TypeError
        On every rank: a weight is negative or not finite, all are zero, or trees differ.
    """
    comm = resolve(comm)
    leaves: list[float] = []
    with raise_on_all_ranks(comm):
        leaves = [float(leaf) for leaf in jax.tree.leaves(values)]
        structure = jax.tree.structure(values)
        if not 0 <= weight < math.inf:
            raise ValueError(f"mean: weight={weight} must be finite, and not negative")
    everybody = comm.mpi.allgather((float(weight), str(structure), leaves))
    if any(text != everybody[0][1] for _, text, _ in everybody):
        rank = next(r for r, told in enumerate(everybody) if told[1] != everybody[0][1])
        raise ValueError(
            f"mean: rank 0 has {everybody[0][1]}, rank {rank} {everybody[rank][1]}; give trees of "
            "one structure on all ranks"
        )
    total = math.fsum(w for w, _, _ in everybody)
    if not total > 0:
        raise ValueError("mean: the weights of all ranks are zero")
    means = [
        math.fsum(w * numbers[i] for w, _, numbers in everybody if w > 0) / total
        for i in range(len(leaves))
    ]
    return jax.tree.unflatten(structure, means)
