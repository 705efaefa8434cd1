"""Pictures that compare the losses, scores and staleness of trainings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpigrad_apps import report
from mpigrad_apps.sgd.run_log import RunLog

__all__ = ["draw_losses", "draw_staleness", "draw_tests"]

_COLOURS = ("#2563a8", "#b3261e", "#2e7d32", "#8e5ea2", "#b7791f", "#57606a")
_LINES = ("-", "--", ":", "-.")  # curves that lie on each other are seen
_SMOOTH = 40  # points of a smoothed curve


def draw_losses(logs: Sequence[RunLog]) -> report.Picture:
    """Draw the loss against wall time and against samples."""

    def draw(figure: Any) -> None:
        for place, (label, of) in enumerate(
            (("seconds since the first update", "seconds"), ("samples", "samples"))
        ):
            axes = figure.add_subplot(1, 2, place + 1)
            for log, colour, line in zip(
                logs, itertools.cycle(_COLOURS), itertools.cycle(_LINES), strict=False
            ):
                x = np.array([getattr(step, of) for step in log.steps])
                y = np.array([step.loss for step in log.steps])
                axes.semilogy(*_smoothed(x, y), line, color=colour, linewidth=1.8, label=log.name)
            _finish(axes, label, "loss of the batches" if place == 0 else "")
            if place == 0:
                axes.legend(fontsize=9)

    return report.drawing(
        "loss",
        "The loss of the batches during training, against wall time and against samples: means "
        "over neighbouring steps.",
        (10.8, 4.4),
        draw,
    )


def draw_tests(logs: Sequence[RunLog], what: str) -> report.Picture:
    """Draw the results for held-out samples after each epoch, against wall time and samples."""

    def draw(figure: Any) -> None:
        scored = all(epoch.score is not None for log in logs for epoch in log.epochs)
        for place, (label, of) in enumerate(
            (("seconds since the first update", "seconds"), ("samples", "samples"))
        ):
            axes = figure.add_subplot(1, 2, place + 1)
            for log, colour, line in zip(
                logs, itertools.cycle(_COLOURS), itertools.cycle(_LINES), strict=False
            ):
                x = [getattr(epoch, of) for epoch in log.epochs]
                y = [epoch.score if scored else epoch.loss for epoch in log.epochs]
                axes.plot(x, y, f"o{line}", color=colour, markersize=3.5, label=log.name)
            _finish(axes, label, (what if scored else "loss") if place == 0 else "")
            if place == 0:
                axes.legend(fontsize=9)

    return report.drawing("test", "Held-out samples, after each epoch.", (10.8, 4.4), draw)


def draw_staleness(logs: Sequence[RunLog]) -> report.Picture:
    """Draw the staleness of the gradients and its effect on the loss."""

    def draw(figure: Any) -> None:
        bars, effect = figure.subplots(1, 2)
        bounded = [
            (log, colour)
            for log, colour in zip(logs, itertools.cycle(_COLOURS), strict=False)
            if log.bound is not None
        ]
        width, most = 0.8 / len(bounded), 0
        for place, (log, colour) in enumerate(bounded):
            counts = Counter(n for step in log.steps for n in step.staleness)
            total = max(sum(counts.values()), 1)
            at = np.array(sorted(counts))
            share = [counts[n] / total for n in at]
            shift = (place - (len(bounded) - 1) / 2) * width
            bars.bar(at + shift, share, width, color=colour, label=log.name)
            most = max(most, *at, 0)
        _finish(bars, "staleness (updates)", "fraction of gradients")
        bars.set_xticks(np.unique(np.linspace(0, most, min(most, 10) + 1).astype(int)))
        bars.set_xlim(-0.9, most + 0.9)
        bars.legend(fontsize=9)
        for log, colour in zip(logs, itertools.cycle(_COLOURS), strict=False):
            stale = [n for step in log.steps for n in step.staleness]
            last = log.steps[-max(1, len(log.steps) // max(len(log.epochs) - 1, 1)) :]
            if last:
                loss = float(np.mean([step.loss for step in last]))
                mean = float(np.mean(stale)) if stale else 0.0
                effect.plot(mean, loss, "o", color=colour, label=log.name)
        effect.set_ylim(0, 1.2 * max(line.get_ydata()[0] for line in effect.lines))
        effect.legend(fontsize=9)
        _finish(effect, "mean staleness (updates)", "loss of the last epoch's batches")

    return report.drawing(
        "staleness",
        "The staleness of the gradients, in updates, and the loss of the last epoch, next to the "
        "loss of trainings without staleness.",
        (10.8, 4.2),
        draw,
    )


def _finish(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="major", alpha=0.3)
    report.plain_numbers(axes)


def _smoothed(
    x: NDArray[np.float64], y: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Average neighbouring points, so that _SMOOTH points are left."""
    parts = np.array_split(np.arange(len(y)), min(len(y), _SMOOTH))
    return np.array([x[part].mean() for part in parts]), np.array(
        [y[part].mean() for part in parts]
    )
