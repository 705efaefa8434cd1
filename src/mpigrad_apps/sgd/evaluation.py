"""Evaluate a model on held-out samples."""

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
    """Make a function that evaluates a model on the held-out samples. Each rank takes a part.

    Parameters
    ----------
    task
        The task with the held-out samples.
    size
        Number of samples that are computed at a time.
    comm
        The ranks that share the samples.

    Returns
    -------
    A collective function of the model. It returns a dictionary of means, equal on all ranks: "loss"
    and, if the task has a score, "score". The dictionary is empty without held-out samples.
    """
    count = len(task.held_out[0]) if task.held_out else 0
    local_rows = np.arange(count * comm.rank // comm.size, count * (comm.rank + 1) // comm.size)
    functions = {"loss": task.loss} | ({"score": task.score} if task.score else {})
    if task.framework == "jax":
        functions = {name: jax.jit(function) for name, function in functions.items()}

    def evaluate(model: Any) -> dict[str, float]:
        totals = dict.fromkeys(functions, 0.0)
        with (
            raise_on_all_ranks(comm),
            _not_training(task, model),
        ):  # a rank without samples cannot fail by itself
            for start in range(0, len(local_rows), size):
                rows = local_rows[start : start + size]
                batch = tuple(array[rows] for array in task.held_out)
                for name, function in functions.items():
                    totals[name] += float(function(model, *batch)) * len(rows)
        means = {name: total / max(len(local_rows), 1) for name, total in totals.items()}
        return mean(means, len(local_rows), comm)

    return evaluate if count else lambda model: {}


@contextlib.contextmanager
def _not_training(task: Task, model: Any) -> Any:
    """Switch a module to evaluation: without a graph, and without dropout."""
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
