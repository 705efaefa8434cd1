"""The training loop of the applications: `minimize` with model errors, saves and a history."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpigrad import optimize
from mpigrad.checkpoint import Checkpoint
from mpigrad.collective_errors import call_on_root, raise_on_all_ranks
from mpigrad.communicator import Communicator
from mpigrad.grid import Grid
from mpigrad.optimize import LBFGS, LBFGSB, MinimizeError, Result, minimize
from mpigrad.profiling import Progress
from mpigrad.runtime import name_in_errors, write_atomically
from mpigrad_apps.grace import hold_grace_time
from mpigrad_apps.output_directory import remove_saves

__all__ = ["TrainingRecord", "TrainingResult", "prepare_training", "seconds_per_iteration", "train"]

_SAVE_EVERY = 5.0  # seconds between saved parameters
_RESTART_EVERY = 1.0  # minutes between saves of all that a restart needs
_MEASURE_EVERY = 10  # iterations between errors of the model


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """One iteration in the history of a training.

    Attributes
    ----------
    iteration, loss, gradient_norm, evaluations, step, seconds
        See `mpigrad.optimize`.
    error
        Distance of the model from the true model, or None if it was not measured.
    stage
        Index of the objective, if several are trained one after the other.
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
    """The result of `train`.

    Attributes
    ----------
    parameters
        The parameters of the smallest loss.
    history
        The records of all stages.
    ending
        The reason why the training ended.
    stopped
        True if the user or the system asked the training to stop.
    """

    parameters: Any
    history: tuple[TrainingRecord, ...]
    ending: str
    stopped: bool


def prepare_training(out: pathlib.Path, comm: Communicator, resume: bool) -> None:
    """Prepare the output directory for the saves and the history of a run (collective).

    Unless the run resumes an earlier one, the saves and the history of the earlier run are removed.
    """
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            saves, history = out / "restart", out / "history.jsonl"
            if resume:
                history.touch()
                return
            remove_saves(saves)
            write_atomically(history, lambda file: None)


def train(
    share: Callable[..., Any],
    parameters: Any,
    iterations: int,
    comm: Communicator,
    *,
    memory: int,
    sharded: Grid | None = None,
    bounds: tuple[Any, Any] | None = None,
    guesses: Any = None,
    out: pathlib.Path,
    save: Callable[[Any], None],
    all_ranks_save: bool = False,
    error: Callable[[Any], float] | None = None,
    stage: int = 0,
    progress: Progress | None = None,
    about: Mapping[str, Any] | None = None,
    advice: str = "Start from other parameters",
) -> TrainingResult:
    """Train by L-BFGS, or by L-BFGS-B within bounds, after `prepare_training` (collective).

    Parameters
    ----------
    share
        Function of the parameters that returns this rank's share of the loss. It may send messages.
    parameters
        The parameters to start from, equal on all ranks, or this rank's tile of them.
    memory
        Number of past steps that L-BFGS remembers.
    sharded
        The grid of the parameters, if each rank has its tile. None: they are equal on all ranks.
    bounds
        Lower and upper bounds of the parameters, as in `mpigrad.optimize.LBFGSB`, or None.
    guesses
        As in `mpigrad.optimize.minimize`. Then `share` has them as its second argument.
    out
        Output directory. It gets history.jsonl, with a line for each completed iteration, and
        restart/, from which the training continues bit for bit from the last save.
    save
        Function that writes parameters to a file. Rank 0 calls it every few seconds with the
        parameters of the smallest loss, and once more when the training ends, also with an error.
    all_ranks_save
        All ranks call `save`, which is collective, but not after an error of one rank.
    error
        Function that returns the distance of the model from the true model, if that is known
        (collective).
    stage
        Index of this objective, if several are trained one after the other.
    progress
        The progress of all stages, if there are several.
    about
        See `Checkpoint`.
    advice
        Remedy that the error names if the loss of the first parameters is NaN.

    Raises
    ------
    RuntimeError
        On every rank, if the loss of the first parameters is not finite.
    """
    history = _History(out / "history.jsonl", comm)
    progress = progress or Progress(iterations, comm.rank)
    latest, saved_at, begun = parameters, time.monotonic(), False
    compiling = contextlib.ExitStack()  # until the first iteration

    def note(now: optimize.Record, x: Any) -> bool:
        nonlocal latest, saved_at, begun
        compiling.close()
        latest, begun = x, True
        progress.update(now.iteration, loss=now.loss, gradient=now.gradient_norm)
        measured = now.iteration % _MEASURE_EVERY == 0 or now.iteration == iterations
        distance = error(x) if error is not None and measured else None
        history.add(TrainingRecord(**dataclasses.asdict(now), error=distance, stage=stage))
        due = comm.rank == 0 and time.monotonic() - saved_at > _SAVE_EVERY
        if comm.mpi.bcast(due) if all_ranks_save else due:
            save(x)
            saved_at = time.monotonic()
        return False

    def save_latest() -> None:
        if (comm.rank == 0 or all_ranks_save) and (begun or not history.of(stage)):
            save(latest)

    checkpoint = Checkpoint(
        out / "restart" / f"stage{stage}",
        minutes=_RESTART_EVERY,
        fingerprint={"memory": memory, **(about or {})},
        resume=True,
    )
    try:
        with contextlib.closing(progress), compiling:
            compiling.enter_context(hold_grace_time(comm))
            solution = minimize(
                share,
                parameters,
                LBFGS(memory) if bounds is None else LBFGSB(bounds, memory),
                replicated=True if sharded is None else None,
                sharded=sharded,
                max_steps=iterations,
                rtol=0.0,
                guesses=guesses,
                callback=note,
                checkpoint=checkpoint,
                comm=comm,
            )
        latest = solution.value
    except MinimizeError as failure:
        if failure.solution is None or not failure.solution.stats["num_steps"]:
            with contextlib.suppress(OSError):
                save_latest()
            raise RuntimeError(f"{failure} ({advice})") from failure
        solution = failure.solution
        latest = solution.value
    except BaseException:  # perhaps of this rank alone, so no message is sent
        if not all_ranks_save:
            with contextlib.suppress(OSError):
                save_latest()
        raise
    if all_ranks_save:
        save_latest()
    else:
        with raise_on_all_ranks(comm):
            save_latest()
    iteration = solution.stats["num_steps"]
    ending = {
        Result.MAX_STEPS_REACHED: f"all {iterations} iterations done",
        Result.SUCCESSFUL: f"gradient zero at iteration {iteration}",
        Result.NO_DECREASE: f"no smaller loss along the gradient at iteration {iteration}",
        Result.INTERRUPTED: f"stopped at iteration {iteration}",
    }.get(solution.result, f"{solution.result.message} at iteration {iteration}")
    stopped = solution.result is Result.INTERRUPTED
    return TrainingResult(
        solution.value, history.whole(solution.stats["history"], stage), ending, stopped
    )


class _History:
    """The records of all stages, on every rank and in a file that grows."""

    def __init__(self, path: pathlib.Path, comm: Communicator) -> None:
        self._path = path
        self._comm = comm
        self._records: list[TrainingRecord] = call_on_root(comm, self._read)
        self._whole = False  # whether the file, which may end in half a line, equals `_records`

    def _read(self) -> list[TrainingRecord]:
        with name_in_errors(self._path):
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        # A job that is killed may leave half a line.
        return [TrainingRecord(**json.loads(line)) for line in lines if line.endswith("\n")]

    def of(self, stage: int) -> list[TrainingRecord]:
        return [record for record in self._records if record.stage == stage]

    def add(self, record: TrainingRecord) -> None:
        """Add an iteration. Earlier records of it and of later iterations are dropped."""
        place = record.stage, record.iteration
        earlier = [r for r in self._records if (r.stage, r.iteration) < place]
        append = self._whole and len(earlier) == len(self._records)
        self._records, self._whole = [*earlier, record], True
        if self._comm.rank == 0:
            text = "".join(
                json.dumps(dataclasses.asdict(r)) + "\n"
                for r in ([record] if append else self._records)
            )
            if not append:
                write_atomically(self._path, lambda file: file.write(text.encode()))
                return
            with name_in_errors(self._path), open(self._path, "a", encoding="utf-8") as file:
                file.write(text)

    def whole(self, saved: tuple[optimize.Record, ...], stage: int) -> tuple[TrainingRecord, ...]:
        """Return the records of earlier stages, and of this stage with the measured errors."""
        errors = {record.iteration: record.error for record in self.of(stage)}
        now = [
            TrainingRecord(**dataclasses.asdict(r), error=errors.get(r.iteration), stage=stage)
            for r in saved
        ]
        return tuple([r for r in self._records if r.stage < stage] + now)


def seconds_per_iteration(history: tuple[TrainingRecord, ...]) -> float:
    """Return the median time of an iteration, which the slow first iterations hardly change."""
    times = np.diff([record.seconds for record in history])
    return float(np.median(times)) if len(times) else math.nan
