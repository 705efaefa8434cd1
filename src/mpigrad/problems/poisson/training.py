"""The training loop: progress, history, saved parameters, and a clean end when asked to stop."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mpigrad import interruption
from mpigrad.communicator import Communicator
from mpigrad.problems.poisson.lbfgs import LBFGS, Iterate
from mpigrad.progress import Progress

__all__ = ["Record", "Trained", "train"]

_SAVE_EVERY = 5.0  # seconds between saved parameters
_MEASURE_EVERY = 10  # iterations between errors of kappa


@dataclasses.dataclass(frozen=True)
class Record:
    """What the history keeps of one iteration.

    `kappa_error` is the largest error of kappa over the grid, None where it wasn't measured.
    """

    iteration: int
    loss: float
    gradient_norm: float
    evaluations: int
    step: float
    seconds: float
    kappa_error: float | None


@dataclasses.dataclass(frozen=True)
class Trained:
    """The parameters of the smallest loss, the history, and why the training ended."""

    parameters: Any
    history: tuple[Record, ...]
    ending: str


def train(
    optimizer: LBFGS,
    parameters: Any,
    iterations: int,
    comm: Communicator,
    *,
    save: Callable[[Any], None],
    history_file: pathlib.Path,
    kappa_error: Callable[[Any], float] | None = None,
) -> Trained:
    """Train (collective): every rank calls it with equal parameters.

    Parameters
    ----------
    save
        Writes parameters to a file; called on rank 0 every few seconds with the best ones so far,
        and once more when the training ends, be it with an error.
    history_file
        Gets a JSON line for each iteration, when it is done.
    kappa_error
        The largest error of kappa over all ranks, if it is known (collective).
    """
    begun = time.monotonic()
    history: list[Record] = []
    progress = Progress(iterations, comm.rank)
    best, unsaved, saved_at = parameters, False, begun
    lowest = math.inf
    ending = f"all {iterations} iterations done"
    forgot = False

    def note(iteration: int, now: Iterate) -> None:
        measured = iteration % _MEASURE_EVERY == 0 or iteration == iterations
        error = kappa_error(now.parameters) if kappa_error is not None and measured else None
        record = Record(
            iteration,
            float(now.loss),
            float(now.gradient_norm),
            int(now.evaluations),
            float(now.step),
            time.monotonic() - begun,
            error,
        )
        history.append(record)
        if log is not None:
            log.write(json.dumps(dataclasses.asdict(record)) + "\n")
            log.flush()
        progress.update(iteration, loss=record.loss, gradient=record.gradient_norm)

    log = history_file.open("w", encoding="utf-8") if comm.rank == 0 else None
    try:
        with interruption.listen() as stop:
            now = optimizer.start(parameters)
            note(0, now)
            lowest = float(now.loss)
            if not math.isfinite(lowest):
                raise RuntimeError(
                    f"the loss of the first parameters is {lowest}: the linear solve failed there. "
                    "Start from other parameters (--seed, --restart)"
                )
            for iteration in range(1, iterations + 1):
                now = optimizer.step(now)
                note(iteration, now)
                if float(now.loss) < lowest:
                    best, unsaved, lowest = now.parameters, True, float(now.loss)
                if comm.rank == 0 and unsaved and time.monotonic() - saved_at > _SAVE_EVERY:
                    save(best)
                    unsaved, saved_at = False, time.monotonic()
                # Any rank may have got the signal; all end at the same iteration.
                if any(comm.mpi.allgather(stop.requested())):
                    ending = f"stopped at iteration {iteration}"
                    break
                if float(now.gradient_norm) == 0:
                    ending = f"gradient zero at iteration {iteration}"
                    break
                if float(now.step) > 0:
                    forgot = False
                elif not forgot:  # a memory of a poor fit may point upwards: try the gradient
                    now, forgot = optimizer.forget(now), True
                else:
                    ending = f"no smaller loss along the gradient at iteration {iteration}"
                    break
    finally:
        progress.close()
        if comm.rank == 0:
            save(best)
        if log is not None:
            log.close()
    return Trained(best, tuple(history), ending)


def seconds_per_iteration(history: tuple[Record, ...]) -> float:
    """Median time of an iteration; the first ones, which compile, weigh no more than others."""
    times = np.diff([record.seconds for record in history])
    return float(np.median(times)) if len(times) else math.nan
