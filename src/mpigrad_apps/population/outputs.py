"""The output of a run: draws, tables, pictures and the report."""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from mpigrad.optimize import Solution
from mpigrad.runtime import write_atomically
from mpigrad_apps import report
from mpigrad_apps.population import pictures
from mpigrad_apps.population.diagnostics import FEWEST_DRAWS, Summary, shared_names, shared_values
from mpigrad_apps.population.kinetics import PARAMETERS, UNITS
from mpigrad_apps.population.model import Model, Unknowns
from mpigrad_apps.population.prediction import Prediction
from mpigrad_apps.population.records import Cohort
from mpigrad_apps.population.sampling import Posterior
from mpigrad_apps.population.settings import Settings
from mpigrad_apps.population.simulation import Truth

__all__ = ["Estimates", "disagreement", "individual_parameters", "write_draws", "write_outputs"]

_AGREED = 1.05  # R-hat


@dataclasses.dataclass(frozen=True)
class Estimates:
    """The content of the report. `draws` are draws of the posterior, or only the mode."""

    cohort: Cohort
    truth: Truth | None
    mode: Solution
    draws: Unknowns
    posterior: Posterior | None
    summary: dict[str, Summary]
    fits: Sequence[Prediction]


def individual_parameters(
    model: Model, unknowns: Unknowns, cohort: Cohort
) -> Float[np.ndarray, "draws patients 5"]:
    """Compute the log parameters of each patient, for unknowns of shape (draws, ...)."""
    weights = np.stack([known.weight for known in cohort.records])
    each = jax.vmap(model.individual, in_axes=(None, 0, 0))
    return np.asarray(jax.vmap(each, in_axes=(0, 0, None))(*unknowns, weights))


def write_draws(out: pathlib.Path, posterior: Posterior) -> None:
    """Write posterior.npz. Call it on one rank."""
    unknowns = posterior.unknowns
    arrays = {**unknowns.shared._asdict(), "effects": unknowns.effects}
    write_atomically(out / "posterior.npz", lambda file: np.savez(file, **arrays))


def write_outputs(settings: Settings, model: Model, found: Estimates, ranks: int) -> pathlib.Path:
    """Write patients.csv, the pictures and report.html. Call it on one rank."""
    parameters = individual_parameters(model, found.draws, found.cohort)
    _write_patients(settings.out / "patients.csv", found.cohort, parameters)
    truth = found.truth
    drawn = [
        pictures.draw_fits(found.cohort, found.fits),
        pictures.draw_agreement(found.cohort, found.fits),
    ]
    if found.posterior is not None:
        shared, prior = found.draws.shared, model.prior
        true = None if truth is None else truth.shared
        drawn.insert(0, pictures.draw_marginals(shared, prior, found.mode.value.shared, true))
        individual = None if truth is None else truth.individual
        drawn.append(pictures.draw_individuals(parameters, individual))
    cohort = found.cohort
    patients = f"{len(cohort.names)} {'simulated ' if truth is not None else ''}patients"
    summary = (
        f"Two compartments, absorption of first order, {patients}, {cohort.measurements} "
        f"concentrations. {_ending(settings, found)}"
    )
    choices = {
        field.name: value
        for field in dataclasses.fields(settings)
        if (value := getattr(settings, field.name)) is not None
    }
    return report.write_report(
        settings.out,
        "A drug in a population",
        summary,
        drawn,
        [
            report.Table("Values that the patients share", _shared(found)),
            *([] if found.posterior is None else [_sampling(found.posterior, found.summary)]),
            report.Table("Mode", _mode(found)),
            report.Table("Ranks", {"ranks": ranks}),
            report.Table("Settings", choices),
            report.Table("Versions", report.versions()),
        ],
    )


def _shared(estimates: Estimates) -> dict[str, object]:
    """Return a text for each value: median and 90 % interval, or the mode, and the truth."""
    true = None if estimates.truth is None else shared_values(estimates.truth.shared)
    mode = shared_values(estimates.mode.value.shared)
    rows: dict[str, object] = {}
    for k, name in enumerate(shared_names()):
        text = f"{mode[k]:.3g} (mode)"
        if name in estimates.summary:
            known = estimates.summary[name]
            text = f"{known.median:.3g} ({known.low:.3g} to {known.high:.3g})"
        unit = f" ({UNITS[k]})" if k < len(UNITS) else ""
        rows[name + unit] = text + ("" if true is None else f", truth {true[k]:.3g}")
    return rows


def _sampling(posterior: Posterior, summary: dict[str, Summary]) -> report.Table:
    sizes = [known.ess for known in summary.values()]
    chains, draws = posterior.steps.shape
    evaluations = int(np.sum(np.max(posterior.steps, axis=0)))  # chains go in step
    quality: dict[str, object] = {"effective sample size": "too few draws"}
    if draws >= FEWEST_DRAWS:
        quality = {
            "effective sample size": f"{min(sizes):.0f} at least, {np.median(sizes):.0f} in median",
            "effective draws per second": f"{min(sizes) / posterior.seconds:.3g} at least, "
            f"{np.median(sizes) / posterior.seconds:.3g} in median",
            "largest R-hat": f"{max(known.rhat for known in summary.values()):.5g}",
        }
    return report.Table(
        "Sampling",
        {
            "draws": f"{chains} chains of {draws}",
            **quality,
            "divergent trajectories": int(np.sum(posterior.divergent)),
            "mean acceptance": f"{np.mean(posterior.acceptance):.3f}",
            "step sizes": ", ".join(f"{size:.3g}" for size in posterior.step_size),
            "time": f"{posterior.warmup_seconds:.1f} s of warm-up with compiling, "
            f"{posterior.seconds:.1f} s of draws",
            "one gradient of all chains": f"{1e3 * posterior.seconds / evaluations:.2f} ms",
        },
    )


def _mode(estimates: Estimates) -> dict[str, object]:
    return {
        "ended": estimates.mode.result.message,
        "log density": f"{-estimates.mode.stats['loss']:.6f}",
        "norm of its gradient": f"{estimates.mode.stats['gradient_norm']:.3e}",
        "evaluations of density and gradient": estimates.mode.stats["evaluations"],
    }


def _ending(settings: Settings, estimates: Estimates) -> str:
    posterior = estimates.posterior
    if posterior is None:
        stopped = " The run was stopped before the first draw." if settings.draws else ""
        return f"The mode of the posterior, without draws.{stopped}"
    chains, draws = posterior.steps.shape
    stopped = "" if draws >= settings.draws else f", stopped at draw {draws} of {settings.draws}"
    text = f"{chains} chains of {draws} draws by NUTS{stopped}."
    return f"{text} {disagreement(estimates.summary)}".rstrip()


def disagreement(summary: dict[str, Summary]) -> str:
    """Return a warning if the chains do not agree yet, else an empty text."""
    worst = max((known.rhat for known in summary.values()), default=0.0)
    if worst > _AGREED:
        return f"The chains do not agree yet (R-hat {worst:.3g}). Increase --warmup and --draws."
    return ""


def _write_patients(
    path: pathlib.Path, cohort: Cohort, parameters: Float[np.ndarray, "draws patients 5"]
) -> None:
    """Write a row for each patient: median, 5 % and 95 % of each of the patient's parameters."""
    quantiles = np.exp(np.quantile(parameters, [0.5, 0.05, 0.95], axis=0))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        ["id", "wt", *(f"{name}{part}" for name in PARAMETERS for part in ("", "_5", "_95"))]
    )
    for i, (name, known) in enumerate(zip(cohort.names, cohort.records, strict=True)):
        values = quantiles[:, i, :].T.ravel()
        table.writerow([name, float(known.weight), *(f"{value:.6g}" for value in values)])
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))
