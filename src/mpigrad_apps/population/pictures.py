"""Pictures of the fits of patients and of the posterior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from mpigrad_apps import report
from mpigrad_apps.population.kinetics import PARAMETERS, UNITS
from mpigrad_apps.population.model import Prior, Shared
from mpigrad_apps.population.prediction import Prediction
from mpigrad_apps.population.records import Cohort

__all__ = ["draw_agreement", "draw_fits", "draw_individuals", "draw_marginals"]

_MOST_PATIENTS = 16
_BLUE, _GREY, _RED = "#2563a8", "#57606a", "#b3261e"


def draw_fits(cohort: Cohort, found: Sequence[Prediction]) -> report.Picture:
    """Draw the measurements and curves of the first patients."""
    count = min(len(found), _MOST_PATIENTS)
    columns = min(count, 4)
    rows = -(-count // columns)

    def draw(figure: Any) -> None:
        for place in range(count):
            axes = figure.add_subplot(rows, columns, place + 1)
            known, fit = cohort.records[place], found[place]
            axes.fill_between(fit.times, fit.low, fit.high, color=_BLUE, alpha=0.25, linewidth=0)
            axes.semilogy(fit.times, fit.middle, color=_BLUE, linewidth=1.4)
            axes.plot(known.times, known.concentrations, "o", color=_RED, markersize=3.5)
            for time in known.dose_times:
                axes.axvline(time, color=_GREY, linewidth=0.6, alpha=0.5)
            top = 2 * max(float(np.nanmax(known.concentrations)), float(np.max(fit.middle)))
            axes.set_ylim(max(float(np.nanmin(known.concentrations)) / 4, top / 1e4), top)
            axes.set_title(f"patient {cohort.names[place]}", fontsize=10, parse_math=False)
            axes.tick_params(labelsize=9)
            axes.tick_params(which="minor", labelleft=False)
            report.plain_numbers(axes)
            if place >= count - columns:
                axes.set_xlabel("time (h)")
            if place % columns == 0:
                axes.set_ylabel("mg/L")

    return report.drawing(
        "fits",
        f"Measured concentrations (dots) of {count} of {len(found)} patients, the curves that "
        "explain them (median and 90 % of the posterior), and the doses (grey lines).",
        (2.7 * columns, 2.1 * rows + 0.4),
        draw,
    )


def draw_marginals(
    draws: Shared, prior: Prior, mode: Shared, truth: Shared | None = None
) -> report.Picture:
    """Draw the posterior of each value that all patients share."""
    typical, spread = np.exp(np.asarray(draws.typical)), np.exp(np.asarray(draws.log_spread))
    panels = [
        (
            f"{name} ({unit})",
            typical[..., k].ravel(),
            _log_normal(prior.medians[k], prior.factor),
            *_exponentials(mode.typical[k], None if truth is None else truth.typical[k]),
        )
        for k, (name, unit) in enumerate(zip(PARAMETERS, UNITS, strict=True))
    ]
    panels += [
        (
            f"spread of {name}",
            spread[..., k].ravel(),
            _half_normal(prior.spread),
            *_exponentials(mode.log_spread[k], None if truth is None else truth.log_spread[k]),
        )
        for k, name in enumerate(PARAMETERS)
    ]
    panels.append(
        (
            "noise",
            np.exp(np.asarray(draws.log_noise)).ravel(),
            _half_normal(prior.noise),
            *_exponentials(mode.log_noise, None if truth is None else truth.log_noise),
        )
    )

    def draw(figure: Any) -> None:
        axes: Any = None
        for place, (title, values, density, at_mode, true) in enumerate(panels):
            axes = figure.add_subplot(3, 4, place + 1)
            axes.hist(values, bins=30, density=True, color=_BLUE, alpha=0.6)
            if true is not None:
                axes.axvline(true, color=_RED, linewidth=1.4, label="truth")
            left, right = axes.get_xlim()  # the mode of a spread may be far outside
            x = np.linspace(max(left, 1e-9), right, 200)
            axes.plot(x, density(x), color=_GREY, linewidth=1.0, label="prior")
            axes.axvline(at_mode, color="black", linestyle=":", linewidth=1.0, label="mode")
            axes.set_xlim(left, right)
            axes.set_title(title, fontsize=10)
            axes.set_yticks([])
            axes.tick_params(labelsize=9)
        figure.legend(*axes.get_legend_handles_labels(), loc="lower right")

    ending = ", the mode and the truth." if truth is not None else ", and the mode."
    if prior.fast:
        ending += " The prior is drawn without its odds for a fast absorption."
    return report.drawing(
        "posterior",
        "The posterior of the values that all patients share: the typical patient of 70 kg, the "
        "standard deviations of the patients' log parameters, and the standard deviation of the "
        f"errors, with the prior{ending}",
        (10.8, 7.2),
        draw,
    )


def draw_individuals(
    log_parameters: Float[np.ndarray, "draws patients 5"],
    truth: Float[np.ndarray, "patients 5"] | None = None,
) -> report.Picture:
    """Draw the parameters of each patient: median and 90 % of the posterior."""
    low, middle, high = np.exp(np.quantile(log_parameters, [0.05, 0.5, 0.95], axis=0))

    def draw(figure: Any) -> None:
        for k, (name, unit) in enumerate(zip(PARAMETERS, UNITS, strict=True)):
            axes = figure.add_subplot(2, 3, k + 1)
            order = np.argsort(middle[:, k] if truth is None else truth[:, k])
            x = np.arange(len(order)) if truth is None else np.exp(truth[order, k])
            errors = np.stack([middle - low, high - middle])[:, order, k]
            axes.errorbar(
                x, middle[order, k], errors, fmt="o", color=_BLUE, markersize=2.5, linewidth=0.6
            )
            axes.set_yscale("log")
            if truth is None:
                axes.xaxis.get_major_locator().set_params(integer=True)
            else:
                axes.set_xscale("log")
                axes.plot(x, x, color=_RED, linewidth=1.0)
            axes.set_title(f"{name} ({unit})", fontsize=10)
            axes.set_xlabel("patients in order" if truth is None else "truth")
            axes.tick_params(labelsize=9, which="both")
            axes.tick_params(which="minor", labelleft=False, labelbottom=False)
            report.plain_numbers(axes)

    return report.drawing(
        "individuals",
        "The parameters of each patient: median and 90 % of the posterior"
        + ("." if truth is None else ", against the truth."),
        (10.8, 6.4),
        draw,
    )


def draw_agreement(cohort: Cohort, found: Sequence[Prediction]) -> report.Picture:
    """Draw measured against explained concentrations of all patients."""
    measured = np.concatenate([known.concentrations for known in cohort.records])
    explained = np.concatenate([fit.at_measurements for fit in found])
    there = np.isfinite(measured)
    measured, explained = measured[there], explained[there]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.loglog(explained, measured, "o", color=_BLUE, markersize=3, alpha=0.6)
        ends = [min(explained.min(), measured.min()), max(explained.max(), measured.max())]
        axes.plot(ends, ends, color=_RED, linewidth=1.0)
        axes.set_xlabel("explained (mg/L), median")
        axes.set_ylabel("measured (mg/L)")
        report.plain_numbers(axes)
        axes.grid(True, which="major", alpha=0.3)

    return report.drawing(
        "agreement",
        "All measurements against the concentrations that explain them.",
        (4.8, 4.4),
        draw,
    )


def _exponentials(*logarithms: Any) -> list[float | None]:
    return [None if value is None else math.exp(float(value)) for value in logarithms]


def _log_normal(median: float, factor: float) -> Any:
    return lambda x: (
        np.exp(-0.5 * (np.log(x / median) / factor) ** 2) / (x * factor * math.sqrt(2 * math.pi))
    )


def _half_normal(scale: float) -> Any:
    return lambda x: 2 * np.exp(-0.5 * (x / scale) ** 2) / (scale * math.sqrt(2 * math.pi))
