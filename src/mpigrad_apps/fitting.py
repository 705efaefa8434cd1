"""The training loop of the problems: `minimize`, with the model's error, saves and a history."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpigrad import optimize
from mpigrad.checkpoint import Checkpoint
from mpigrad.collective_errors import call_on_root, raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.optimize import LBFGS, Result, minimize

__all__ = ["TrainingRecord", "TrainingResult", "prepare_training", "seconds_per_iteration", "train"]

_SAVE_EVERY = 5.0  # seconds between saved parameters
_RESTART_EVERY = 1.0  # minutes between saves of all that a restart needs
_MEASURE_EVERY = 10  # iterations between errors of the model


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
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
class TrainingResult:
    """The parameters of the smallest loss, the history of all stages, and why the training ended.

    `stopped`: somebody asked for it.
    """

    parameters: Any
    history: tuple[TrainingRecord, ...]
    ending: str
    stopped: bool


def prepare_training(out: pathlib.Path, comm: Communicator, resume: bool) -> None:
    """Make way for the saves and the history of a new run (collective).

    The saves of an earlier run in `out` are moved aside, so that it can still be resumed; what it
    has written besides is replaced.
    """
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            saves, history = out / "restart", out / "history.jsonl"
            if resume:
                history.touch()
                return
            if saves.exists():
                before = out / "restart.before"
                shutil.rmtree(before, ignore_errors=True)
                saves.rename(before)
            history.write_text("", encoding="utf-8")


def train(
    share: Callable[[Any], Any],
    parameters: Any,
    iterations: int,
    comm: Communicator,
    *,
    memory: int,
    out: pathlib.Path,
    save: Callable[[Any], None],
    error: Callable[[Any], float] | None = None,
    stage: int = 0,
    about: Mapping[str, Any] | None = None,
    advice: str = "Start from other parameters",
) -> TrainingResult:
    """Train by L-BFGS (collective): every rank calls it with equal parameters, after `begin`.

    Parameters
    ----------
    share
        Function of the parameters that gives this rank's share of the loss, with messages inside.
    memory
        Number of past steps that L-BFGS remembers.
    out
        Gets history.jsonl, a line for each iteration when it is done, and restart/, from which the
        training goes on bit for bit where it was when it was saved last.
    save
        Writes parameters to a file; called on rank 0 every few seconds with those of the smallest
        loss, and once more when the training ends, be it with an error.
    error
        The model's distance from the true one, if that is known (collective).
    stage
        Number of this objective among those that are trained one after the other.
    about
        See `Checkpoint`.
    advice
        What to do where the loss of the first parameters is not a number.

    Raises
    ------
    RuntimeError
        On every rank, where the loss of the first parameters is not finite.
    """
    history = _History(out / "history.jsonl", comm)
    latest, saved_at, begun = parameters, time.monotonic(), False

    def note(now: optimize.Record, x: Any) -> bool:
        nonlocal latest, saved_at, begun
        latest, begun = x, True
        measured = now.iteration % _MEASURE_EVERY == 0 or now.iteration == iterations
        distance = error(x) if error is not None and measured else None
        history.add(TrainingRecord(**dataclasses.asdict(now), error=distance, stage=stage))
        if comm.rank == 0 and time.monotonic() - saved_at > _SAVE_EVERY:
            save(x)
            saved_at = time.monotonic()
        return False

    checkpoint = Checkpoint(
        out / "restart" / f"stage{stage}",
        minutes=_RESTART_EVERY,
        about={"memory": memory, **(about or {})},
    )
    try:
        solution = minimize(
            share,
            parameters,
            LBFGS(memory),
            iterations=iterations,
            rtol=0.0,
            callback=note,
            checkpoint=checkpoint,
            progress=True,
            comm=comm,
        )
        latest = solution.value
    except RuntimeError as failure:
        if not begun and "the loss of x0" in str(failure):
            raise RuntimeError(f"{failure} ({advice})") from failure
        raise
    finally:
        if comm.rank == 0 and (begun or not history.of(stage)):
            save(latest)
    iteration = solution.stats["iterations"]
    ending = {
        Result.ITERATIONS: f"all {iterations} iterations done",
        Result.CONVERGED: f"gradient zero at iteration {iteration}",
        Result.NO_DECREASE: f"no smaller loss along the gradient at iteration {iteration}",
        Result.INTERRUPTED: f"stopped at iteration {iteration}",
    }.get(solution.result, f"{solution.result} at iteration {iteration}")
    stopped = solution.result is Result.INTERRUPTED
    return TrainingResult(solution.value, history.whole(solution.history, stage), ending, stopped)


class _History:
    """The records of all stages, on every rank, and as a file that grows."""

    def __init__(self, path: pathlib.Path, comm: Communicator) -> None:
        self._path = path
        self._comm = comm
        self._records: list[TrainingRecord] = call_on_root(comm, self._read)
        self._whole = False  # the file, which may end in half a line, is what `_records` holds

    def _read(self) -> list[TrainingRecord]:
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        # A job that is killed may leave half a line.
        return [TrainingRecord(**json.loads(line)) for line in lines if line.endswith("\n")]

    def of(self, stage: int) -> list[TrainingRecord]:
        return [record for record in self._records if record.stage == stage]

    def add(self, record: TrainingRecord) -> None:
        """One iteration more; what was noted of it and of later ones before is forgotten."""
        place = record.stage, record.iteration
        earlier = [r for r in self._records if (r.stage, r.iteration) < place]
        append = self._whole and len(earlier) == len(self._records)
        self._records, self._whole = [*earlier, record], True
        if self._comm.rank == 0:
            with open(self._path, "a" if append else "w", encoding="utf-8") as file:
                for r in [record] if append else self._records:
                    file.write(json.dumps(dataclasses.asdict(r)) + "\n")

    def whole(self, saved: tuple[optimize.Record, ...], stage: int) -> tuple[TrainingRecord, ...]:
        """The records of earlier stages, and those of this one with the errors that are known."""
        errors = {record.iteration: record.error for record in self.of(stage)}
        now = [
            TrainingRecord(**dataclasses.asdict(r), error=errors.get(r.iteration), stage=stage)
            for r in saved
        ]
        return tuple([r for r in self._records if r.stage < stage] + now)


def seconds_per_iteration(history: tuple[TrainingRecord, ...]) -> float:
    """Median time of an iteration; the first ones, which compile, weigh no more than others."""
    times = np.diff([record.seconds for record in history])
    return float(np.median(times)) if len(times) else math.nan
