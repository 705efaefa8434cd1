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
from mpigrad.problems.lbfgs import LBFGS, Iterate
from mpigrad.progress import Progress

__all__ = ["Record", "Standing", "Trained", "seconds_per_iteration", "train"]

_SAVE_EVERY = 5.0  # seconds between saved parameters
_MEASURE_EVERY = 10  # iterations between errors of the model


@dataclasses.dataclass(frozen=True)
class Record:
    """What the history keeps of one iteration.

    `error` is the model's distance from the true one, None where it wasn't measured; `stage`
    counts the objectives that were trained one after the other.
    """

    iteration: int
    loss: float
    gradient_norm: float
    evaluations: int
    step: float
    seconds: float
    error: float | None
    stage: int = 0


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where a training is: all that it needs to go on as if it had never stopped.

    `stuck`: the last step found no smaller loss. `history` is that of all stages so far.
    """

    now: Iterate
    best: Any
    lowest: float
    stuck: bool
    history: tuple[Record, ...]


@dataclasses.dataclass(frozen=True)
class Trained:
    """The parameters of the smallest loss, the history, and why the training ended.

    `stopped`: somebody asked for it.
    """

    parameters: Any
    history: tuple[Record, ...]
    ending: str
    stopped: bool


def train(
    optimizer: LBFGS,
    parameters: Any,
    iterations: int,
    comm: Communicator,
    *,
    save: Callable[[Standing], None],
    history_file: pathlib.Path,
    error: Callable[[Any], float] | None = None,
    stage: int = 0,
    earlier: tuple[Record, ...] = (),
    resume: Standing | None = None,
    advice: str = "Start from other parameters",
) -> Trained:
    """Train (collective): every rank calls it with equal parameters.

    Parameters
    ----------
    save
        Writes to a file what it is given; called on rank 0 every few seconds with where the
        training is, and once more when the training ends, be it with an error.
    history_file
        Gets a JSON line for each iteration, when it is done.
    error
        The model's distance from the true one, if that is known (collective).
    stage
        Number of this objective among those that are trained one after the other.
    earlier
        Records of the stages before.
    resume
        Where a training of this stage was when it was saved; `parameters` and `earlier` are then
        not used. It goes on bit for bit as it would have gone on.
    advice
        What to do where the loss of the first parameters is not a number.

    Raises
    ------
    RuntimeError
        On every rank, where the loss of the first parameters is not finite.
    """
    history: list[Record] = list(earlier if resume is None else resume.history)
    begun = time.monotonic() - (history[-1].seconds if history else 0.0)
    progress = Progress(iterations, comm.rank)
    best, lowest, stuck = parameters, math.inf, False
    now = optimizer.blank(parameters)
    saved_at = time.monotonic()
    ending, stopped = f"all {iterations} iterations done", False
    log = history_file.open("w", encoding="utf-8") if comm.rank == 0 else None

    def write(record: Record) -> None:
        if log is not None:
            log.write(json.dumps(dataclasses.asdict(record)) + "\n")
            log.flush()

    def note(iteration: int, now: Iterate) -> None:
        measured = iteration % _MEASURE_EVERY == 0 or iteration == iterations
        history.append(
            Record(
                iteration,
                float(now.loss),
                float(now.gradient_norm),
                int(now.evaluations),
                float(now.step),
                time.monotonic() - begun,
                error(now.parameters) if error is not None and measured else None,
                stage,
            )
        )
        write(history[-1])
        progress.update(iteration, loss=history[-1].loss, gradient=history[-1].gradient_norm)

    for record in history:
        write(record)
    try:
        with interruption.listen() as stop:
            if resume is not None:
                now, best, lowest, stuck = resume.now, resume.best, resume.lowest, resume.stuck
            else:
                now = optimizer.start(parameters)
                note(0, now)
                lowest = float(now.loss)
                if not math.isfinite(lowest):
                    raise RuntimeError(f"the loss of the first parameters is {lowest}: {advice}")
            for iteration in range(history[-1].iteration + 1, iterations + 1):
                if stuck:  # a memory of a poor fit may point upwards: try the gradient
                    now = optimizer.forget(now)
                now = optimizer.step(now)
                note(iteration, now)
                if float(now.loss) < lowest:
                    best, lowest = now.parameters, float(now.loss)
                hopeless = stuck and float(now.step) == 0
                stuck = float(now.step) == 0
                if comm.rank == 0 and time.monotonic() - saved_at > _SAVE_EVERY:
                    save(Standing(now, best, lowest, stuck, tuple(history)))
                    saved_at = time.monotonic()
                # Any rank may have got the signal; all end at the same iteration.
                if any(comm.mpi.allgather(stop.requested())):
                    ending, stopped = f"stopped at iteration {iteration}", True
                    break
                if float(now.gradient_norm) == 0:
                    ending = f"gradient zero at iteration {iteration}"
                    break
                if hopeless:
                    ending = f"no smaller loss along the gradient at iteration {iteration}"
                    break
    finally:
        progress.close()
        if comm.rank == 0:
            save(Standing(now, best, lowest, stuck, tuple(history)))
        if log is not None:
            log.close()
    return Trained(best, tuple(history), ending, stopped)


def seconds_per_iteration(history: tuple[Record, ...]) -> float:
    """Median time of an iteration; the first ones, which compile, weigh no more than others."""
    times = np.diff([record.seconds for record in history])
    return float(np.median(times)) if len(times) else math.nan
