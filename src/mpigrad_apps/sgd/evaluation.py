"""What a model makes of samples that it has not been trained on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.training import mean
from mpigrad_apps.sgd.task import Task

__all__ = ["make_evaluator"]


def make_evaluator(task: Task, size: int, comm: Communicator) -> Callable[[Any], dict[str, float]]:
    """A function of the model: means over the held-out samples, each rank taking its part.

    Parameters
    ----------
    size
        Samples that are computed at a time.

    Returns
    -------
    Collective; it gives "loss" and, where the task has one, "score", equal on all ranks; nothing
    where no sample is held out.
    """
    count = len(task.held_out[0]) if task.held_out else 0
    mine = np.arange(count * comm.rank // comm.size, count * (comm.rank + 1) // comm.size)
    functions = {"loss": task.loss} | ({"score": task.score} if task.score else {})
    if task.framework == "jax":
        functions = {name: jax.jit(function) for name, function in functions.items()}

    def evaluate(model: Any) -> dict[str, float]:
        totals = dict.fromkeys(functions, 0.0)
        with (
            raise_on_all_ranks(comm),
            _not_training(task, model),
        ):  # a rank may have no sample to fail with
            for start in range(0, len(mine), size):
                rows = mine[start : start + size]
                batch = tuple(array[rows] for array in task.held_out)
                for name, function in functions.items():
                    totals[name] += float(function(model, *batch)) * len(rows)
        means = {name: total / max(len(mine), 1) for name, total in totals.items()}
        return mean(means, len(mine), comm)

    return evaluate if count else lambda model: {}


@contextlib.contextmanager
def _not_training(task: Task, model: Any) -> Any:
    """A module keeps no graph, and its dropout and the like rest."""
    if task.framework != "torch":
        yield
        return
    import torch  # pyright: ignore[reportMissingImports]

    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)
