"""Run the sgd application, from settings to report: several trainings from the same start."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
import time
from typing import Any

from mpigrad import checkpoint
from mpigrad.checkpoint import Checkpoint
from mpigrad.collective_errors import call_on_root, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.profiling import duration
from mpigrad.runtime import name_in_errors
from mpigrad.training import (
    Batches,
    History,
    LocalSGD,
    ParameterServer,
    Strategy,
    Synchronous,
    trainer,
)
from mpigrad_apps.grace import hold_grace_time
from mpigrad_apps.output_directory import prepare_output, remove_saves
from mpigrad_apps.sgd.evaluation import make_evaluator
from mpigrad_apps.sgd.outputs import write_history, write_parameters, write_report
from mpigrad_apps.sgd.run_log import EpochRecord, RunLog, StepRecord
from mpigrad_apps.sgd.settings import Settings
from mpigrad_apps.sgd.task import Task, load_task

__all__ = ["SGDResult", "run"]

_SAVE_EVERY = 1.0  # minutes
_EPOCHS = "epochs.jsonl"
# Settings that a resumed run must share with the earlier run, in addition to the strategy.
_IN_COMMON = ("module", "framework", "batch", "optimizer", "learning_rate", "momentum", "seed")


@dataclasses.dataclass(frozen=True)
class SGDResult:
    """The result of `run`, the same on all ranks: the models, and the log of each training."""

    settings: Settings
    models: tuple[Any, ...]
    logs: tuple[RunLog, ...]
    report: pathlib.Path


def run(settings: Settings, comm: Communicator | None = None) -> SGDResult:
    """Train in each mode, test after each epoch, write the report (collective).

    The run writes into `settings.out`: report.html and its pictures, settings.json, and a directory
    for each training with history.jsonl, the parameters (model.npz or model.pt) and restart/. The
    saves in restart/ are written every minute, and the run continues from them with
    `settings.resume`. When asked to stop (SIGTERM, SIGINT, SIGUSR1, or the launcher's Ctrl-C), the
    run finishes its step and reports the results so far.

    Parameters
    ----------
    settings
        The options of `mpigrad run sgd`.
    comm
        The ranks that take part; by default all ranks.

    Raises
    ------
    ValueError, TypeError, OSError
        On every rank, before the first step, if the settings, the user's factory or the output
        directory are not valid.
    """
    comm = resolve(comm)
    call_on_root(comm, settings.check)
    with raise_on_all_ranks(comm):
        task = load_task(settings)
    prepare_output(settings, settings.out, comm)
    if comm.rank == 0:
        print(
            f"sgd: {task.rows} samples in batches of {settings.batch}, {settings.epochs} epochs, "
            f"{task.framework}, on {comm.size} rank{'s' * (comm.size > 1)}",
            flush=True,
        )
    models, logs = [], []
    progress = _Epochs(settings.epochs * len(strategies(settings)))
    with checkpoint.listen() as stop:
        for name, strategy in strategies(settings).items():
            model, log = _train(settings, name, strategy, stop, progress, comm)
            models.append(model)
            logs.append(log)
            if log.stopped:
                break
        path = settings.out / "report.html"
        with raise_on_all_ranks(comm), hold_grace_time(comm):
            if comm.rank == 0:
                path = write_report(settings, task, logs, comm.size)
                print(f"report: {path}", flush=True)
    return SGDResult(settings, tuple(models), tuple(logs), path)


class _Epochs:
    """The epochs of all trainings, and the time that those of this run take."""

    def __init__(self, total: int) -> None:
        self.total, self._done, self._begun = total, 0, time.monotonic()

    def advance(self) -> str:
        """Count an epoch, and return a text with the time left of the whole run."""
        self._done += 1
        each = (time.monotonic() - self._begun) / self._done
        return f"  {duration(each * (self.total - self._done))} left"


def strategies(settings: Settings) -> dict[str, Strategy]:
    """Return the strategies of the trainings by the names of their directories."""
    by_name: dict[str, Strategy] = {}
    for mode in settings.mode:
        if mode == "synchronous":
            by_name[mode] = Synchronous(
                compression=None if settings.compression == "none" else settings.compression,
                accumulate=settings.accumulate,
                clip=settings.clip,
            )
        elif mode == "local":
            by_name[mode] = LocalSGD(settings.every)
        else:
            for bound in settings.staleness:
                by_name[f"{mode}-{bound}"] = ParameterServer(
                    staleness=bound, scale_by_staleness=settings.scale_by_staleness
                )
    return by_name


def _train(
    settings: Settings,
    name: str,
    strategy: Strategy,
    stop: checkpoint.Interruption,
    progress: _Epochs,
    comm: Communicator,
) -> tuple[Any, RunLog]:
    """One training: its model, and its log."""
    out = settings.out / name
    with raise_on_all_ranks(comm):
        task = load_task(settings)  # once more: training changes a module
        if comm.rank == 0:
            _prepare_directory(out, settings.resume)
    test = make_evaluator(task, settings.batch, comm)
    training = trainer(task.model, optimizer(settings, task), task.loss, strategy, comm=comm)
    batches = Batches(task.rows, settings.batch, seed=settings.seed, take=task.batch)
    about = {name: str(getattr(settings, name)) for name in _IN_COMMON}
    checkpoint = Checkpoint(
        out / "restart",
        minutes=_SAVE_EVERY,
        fingerprint={"strategy": str(strategy), **about},
        resume=True,
    )
    epochs = call_on_root(comm, lambda: _read_epochs(out))
    progress.total -= min(max(len(epochs) - 1, 0), settings.epochs)  # of an earlier run
    ending, stopped = f"all {settings.epochs} epochs done", False
    compiling = contextlib.ExitStack()  # until the first epoch has ended
    with compiling:
        compiling.enter_context(hold_grace_time(comm))
        if not epochs:
            epochs.append(
                _record_epoch(
                    EpochRecord(0, 0.0, 0.0), test(training.model), settings, name, "", comm
                )
            )
        for epoch in range(min(len(epochs), settings.epochs), settings.epochs + 1):
            batches.epochs = epoch
            history = training.run(batches, checkpoint=checkpoint)
            compiling.close()
            steps = _steps(history)
            if not history.interrupted and epoch == len(epochs):
                now = EpochRecord(epoch, steps[-1].samples, steps[-1].seconds)
                scores = test(training.model)
                left = progress.advance()
                epochs.append(_record_epoch(now, scores, settings, name, left, comm))
            stopped = history.interrupted or any(comm.mpi.allgather(stop.requested()))
            if stopped:
                ending = f"stopped in epoch {epoch}"
                break
    bound = strategy.staleness if isinstance(strategy, ParameterServer) else None
    log = RunLog(name, _steps(training.history), tuple(epochs), ending, stopped, bound)
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            write_history(out / "history.jsonl", log)
            write_parameters(out, training.model, task.framework)
    return training.model, log


def optimizer(settings: Settings, task: Task) -> Any:
    """Return the optimizer of the task, or else of the settings."""
    if task.optimizer is not None:
        return task.optimizer
    rate, momentum = settings.learning_rate, settings.momentum
    if task.framework == "torch":
        import torch  # pyright: ignore[reportMissingImports]

        if settings.optimizer == "adam":
            return torch.optim.Adam(task.model.parameters(), rate)
        return torch.optim.SGD(task.model.parameters(), rate, momentum)
    import optax

    return optax.adam(rate) if settings.optimizer == "adam" else optax.sgd(rate, momentum)


def _prepare_directory(out: pathlib.Path, resume: bool) -> None:
    """Make the directory of a run. Saves of an earlier run are removed unless it is resumed."""
    out.mkdir(exist_ok=True)
    if resume:
        return
    remove_saves(out / "restart")
    (out / _EPOCHS).unlink(missing_ok=True)


def _read_epochs(out: pathlib.Path) -> list[EpochRecord]:
    """Read the epochs that an earlier run has tested."""
    path = out / _EPOCHS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    # A job that is killed may leave half a line.
    return [EpochRecord(**json.loads(line)) for line in lines if line.endswith("\n")]


def _record_epoch(
    epoch: EpochRecord,
    scores: dict[str, float],
    settings: Settings,
    name: str,
    left: str,
    comm: Communicator,
) -> EpochRecord:
    """Return the epoch with its test results. Rank 0 writes and prints them."""
    epoch = dataclasses.replace(epoch, **scores)
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            path = settings.out / name / _EPOCHS
            with name_in_errors(path), open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(epoch)) + "\n")
            values = "".join(f"  {what} {value:.4f}" for what, value in scores.items())
            place = f"{epoch.epoch}/{settings.epochs}"
            print(f"{name}: epoch {place}{values}  {duration(epoch.seconds)}{left}", flush=True)
    return epoch


def _steps(history: History) -> tuple[StepRecord, ...]:
    """Convert the records to steps. Their times begin at the first update, which compiles."""
    records = history.records
    met = itertools.accumulate(record.samples for record in records)
    return tuple(
        StepRecord(
            record.step,
            record.loss,
            samples,
            record.seconds - records[0].seconds,
            record.staleness,
        )
        for record, samples in zip(records, met, strict=True)
    )
