"""The output of a run: histories, parameters, pictures and the report."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpigrad.runtime import write_atomically
from mpigrad_apps import report
from mpigrad_apps.sgd import pictures
from mpigrad_apps.sgd.run_log import RunLog
from mpigrad_apps.sgd.settings import Settings
from mpigrad_apps.sgd.task import Task

__all__ = ["write_history", "write_parameters", "write_report"]


def write_parameters(directory: pathlib.Path, model: Any, framework: str) -> pathlib.Path:
    """Write model.pt, a `state_dict`, or model.npz, the arrays by their paths in the pytree."""
    if framework == "torch":
        import torch  # pyright: ignore[reportMissingImports]

        path = directory / "model.pt"
        write_atomically(path, lambda file: torch.save(model.state_dict(), file))
        return path
    path = directory / "model.npz"
    arrays = {
        jax.tree_util.keystr(place): np.asarray(leaf)
        for place, leaf in jax.tree_util.tree_leaves_with_path(model)
    }
    write_atomically(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
    return path


def write_history(path: pathlib.Path, log: RunLog) -> None:
    """Write a line of JSON for each step."""
    text = "".join(json.dumps(dataclasses.asdict(step)) + "\n" for step in log.steps)
    write_atomically(path, lambda file: file.write(text.encode()))


def write_report(
    settings: Settings, task: Task, logs: Sequence[RunLog], ranks: int
) -> pathlib.Path:
    """Write the pictures and report.html. Call it on one rank."""
    drawn = [pictures.draw_losses(logs)]
    if all(log.epochs for log in logs) and task.held_out:
        what = "accuracy" if settings.module is None else "score"
        drawn.append(pictures.draw_tests(logs, what))
    if any(n for log in logs for step in log.steps for n in step.staleness):
        drawn.append(pictures.draw_staleness(logs))
    return report.write_report(
        settings.out,
        "Stochastic gradients on several ranks",
        _summary(settings, task, logs, ranks),
        drawn,
        [
            *(report.Table(log.name, _outcome(log)) for log in logs),
            report.Table("Ranks", {"ranks": ranks}),
            report.Table("Settings", _choices(settings)),
            report.Table("Versions", _versions(task)),
        ],
    )


def _summary(settings: Settings, task: Task, logs: Sequence[RunLog], ranks: int) -> str:
    what = (
        "A small convolutional network reads handwritten digits"
        if settings.module is None
        else f"{settings.module}"
    )
    names = ", ".join(log.name for log in logs)
    text = (
        f"{what}: {task.rows} samples in batches of {settings.batch}, {ranks} "
        f"rank{'s' * (ranks > 1)}, {'PyTorch' if task.framework == 'torch' else 'JAX'}. "
        f"Trainings: {names}."
    )
    best = [c.epochs[-1].score for c in logs if c.epochs and c.epochs[-1].score is not None]
    if best and settings.module is None:
        low, high = f"{min(best):.1%}", f"{max(best):.1%}"
        read = low if low == high else f"{low} to {high}"
        networks = "network reads" if len(best) == 1 else "networks read"
        text += f" The {networks} {read} of the held-out digits."
    return text


def _outcome(log: RunLog) -> dict[str, object]:
    rows: dict[str, object] = {"ended": log.ending}
    if log.steps:
        last = log.steps[-1]
        rows |= {
            "updates (of local SGD: means)": len(log.steps),
            "samples": f"{last.samples:.0f}",
            "time since the first update": f"{last.seconds:.2f} s",
            "one update (median)": f"{1e3 * _median_time(log):.2f} ms",
        }
    if log.epochs:
        test = log.epochs[-1]
        if test.loss is not None:
            rows["loss of the held-out samples"] = f"{test.loss:.4f}"
        if test.score is not None:
            rows["score of the held-out samples"] = f"{test.score:.4f}"
    stale = [n for step in log.steps for n in step.staleness]
    if stale:
        rows["staleness"] = f"{np.mean(stale):.2f} in the mean, {max(stale)} at most"
    return rows


def _median_time(log: RunLog) -> float:
    times = np.diff([step.seconds for step in log.steps])
    return float(np.median(times)) if len(times) else float("nan")


def _choices(settings: Settings) -> dict[str, object]:
    return {
        field.name.replace("_", " "): _words(value)
        for field in dataclasses.fields(settings)
        if (value := getattr(settings, field.name)) not in (None, ())
    }


def _words(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else value


def _versions(task: Task) -> dict[str, object]:
    rows = report.versions()
    if task.framework == "torch":
        import torch  # pyright: ignore[reportMissingImports]

        return {**rows, "PyTorch": torch.__version__}
    import optax

    return {**rows, "optax": optax.__version__}
