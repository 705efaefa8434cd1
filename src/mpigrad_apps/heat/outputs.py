"""The output of a run: fields, pictures, the animation and the report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.grid import Grid
from mpigrad_apps import report
from mpigrad_apps.animation import animate
from mpigrad_apps.field_files import write_field_files
from mpigrad_apps.fitting import TrainingRecord, seconds_per_iteration
from mpigrad_apps.heat.experiment import Experiment
from mpigrad_apps.heat.inverse import InverseProblem
from mpigrad_apps.heat.settings import Settings
from mpigrad_apps.heat.simulation import Film

__all__ = ["write_estimation", "write_film"]

_EQUATION = "u_t = div(kappa grad u) + f on the unit square"
_MOST_PIXELS = 600  # along an axis of a map; larger fields are thinned out


def write_film(settings: Settings, plan: Experiment, film: Film) -> None:
    """Write fields.zarr, the pictures, heat.gif and report.html (collective)."""
    grid = plan.grid
    write_field_files(
        settings.out / "fields",
        grid,
        {"kappa": np.asarray(plan.kappa)},
        {"equation": _EQUATION, "ending": film.ending},
        vtk=settings.vtk,
        snapshots={time: {"u": tile} for time, tile in film.snapshots.items()},
    )
    kappa = _drawn(grid, np.asarray(plan.kappa))
    with raise_on_all_ranks(grid.comm):
        if film.pictures is not None and kappa is not None:
            _write_film_report(settings, plan, film, kappa)


def _write_film_report(settings: Settings, plan: Experiment, film: Film, kappa: Any) -> None:
    assert film.pictures is not None
    model = plan.model
    hottest = float(np.max(film.pictures)) or 1.0
    shown = np.unique(np.linspace(0, len(film.times) - 1, 5).astype(int)[1:])
    pictures = [
        report.maps(
            "kappa", "The diffusivity.", [report.Panel("diffusivity", kappa, quantity="κ")]
        ),
        report.maps(
            "snapshots",
            "u in the plate, in the same colours. heat.gif shows all frames.",
            [
                report.Panel(
                    f"t = {film.times[k]:.3g}", film.pictures[k], (0.0, hottest), quantity="u"
                )
                for k in shown
            ],
        ),
        report.curve(
            "heat",
            "The heat in the plate: the integral of u.",
            {"heat": (film.times.tolist(), film.heat.tolist())},
            x_label="time",
            y_label="heat",
            linear=True,
        ),
    ]
    titles = [f"t = {t:.4f}" for t in film.times]
    animate(settings.out / "heat.gif", film.pictures, titles, (0.0, hottest), quantity="u")
    steps = film.seconds / max(len(film.times) - 2, 1) / (model.steps / settings.frames)
    outcome = {
        "ended": film.ending,
        "heat at the end": f"{film.heat[-1]:.6g}",
        "largest u": f"{hottest:.6g}",
        "one time step": f"{1e3 * steps:.3g} ms",
    }
    _write_report(
        settings,
        plan,
        "Heat in a plate",
        f"A heater goes around in the unit square, u_t = ∇·(κ∇u) + f, {_edge(settings)}. "
        f"{model.steps} time steps of {model.dt:.3g}: {film.ending}.",
        pictures,
        outcome,
    )


def write_estimation(
    settings: Settings,
    problem: InverseProblem,
    kappa: Float[np.ndarray, "lx ly"],
    history: tuple[TrainingRecord, ...],
    ending: str,
) -> None:
    """Write fields.zarr, the pictures and report.html (collective)."""
    plan = problem.experiment
    grid = plan.grid
    true = np.asarray(plan.kappa)
    seen = np.zeros(grid.n_local)
    seen[problem.thermometers] = 1
    seen = seen.reshape(grid.local_shape)
    write_field_files(
        settings.out / "fields",
        grid,
        {"kappa": kappa, "true_kappa": true, "observed": seen},
        {"equation": _EQUATION, "ending": ending},
        vtk=settings.vtk,
    )
    count = sum(grid.comm.mpi.allgather(len(problem.thermometers)))
    drawn = [_drawn(grid, field) for field in (kappa, true, seen)]
    with raise_on_all_ranks(grid.comm):
        if grid.comm.rank == 0:
            _write_estimation_report(settings, plan, drawn, history, ending, count)


def _write_estimation_report(
    settings: Settings,
    plan: Experiment,
    drawn: Sequence[Any],
    history: tuple[TrainingRecord, ...],
    ending: str,
    count: int,
) -> None:
    estimated, truth, places = drawn
    assert estimated is not None and truth is not None and places is not None
    limits = float(min(estimated.min(), truth.min())), float(max(estimated.max(), truth.max()))
    errors = [(r.iteration, r.error) for r in history if r.error is not None]
    every = [record.iteration for record in history]
    lines = {
        "loss": (every, [record.loss for record in history]),
        "norm of its gradient": (every, [record.gradient_norm for record in history]),
        "largest error of κ": ([i for i, _ in errors], [error for _, error in errors]),
    }
    pictures = [
        report.maps(
            "kappa",
            "True and estimated κ, in the same colours, and their difference.",
            [
                report.Panel("true κ", truth, limits, quantity="κ"),
                report.Panel("estimated κ", estimated, limits, quantity="κ"),
                report.Panel(
                    "estimated − true κ", estimated - truth, diverging=True, quantity="error of κ"
                ),
            ],
        ),
        report.maps(
            "observed",
            "The thermometers: one in each black cell.",
            [report.Panel("thermometers", places, mask=True)],
        ),
        report.curve("loss", "The training, iteration by iteration.", lines),
    ]
    best = min(history, key=lambda record: record.loss)  # the result has its parameters
    outcome = {
        "ended": ending,
        "loss": f"{best.loss:.6e}",
        "norm of its gradient": f"{best.gradient_norm:.3e}",
        "evaluations of loss and gradient": history[-1].evaluations,
        "largest error of κ": f"{errors[-1][1]:.5f}",
        "one iteration (median)": f"{seconds_per_iteration(history):.3f} s",
    }
    means = "a neural network" if settings.unknown == "network" else "one value per cell"
    _write_report(
        settings,
        plan,
        "Diffusivity from thermometers",
        f"κ in u_t = ∇·(κ∇u) + f on the unit square, {_edge(settings)}, given by {means} and "
        f"estimated from {count} thermometers. L-BFGS: {ending}, loss {best.loss:.3e}, largest "
        f"error of κ {errors[-1][1]:.4f}.",
        pictures,
        outcome,
    )


def _write_report(
    settings: Settings,
    plan: Experiment,
    title: str,
    summary: str,
    pictures: Sequence[report.Picture],
    outcome: Mapping[str, object],
) -> None:
    grid, model = plan.grid, plan.model
    choices = {
        field.name: value
        for field in dataclasses.fields(settings)
        if (value := getattr(settings, field.name)) is not None
    }
    choices |= {"cells": f"{grid.shape[0]} x {grid.shape[1]}", "steps": model.steps}
    parallel = {"ranks": grid.comm.size, "tiles": f"{grid.dims[0]} x {grid.dims[1]}"}
    if model.solver is not None:
        parallel["solver"] = str(model.solver)
    path = report.write_report(
        settings.out,
        title,
        summary,
        pictures,
        [
            report.Table("Result", outcome),
            report.Table("Ranks", parallel),
            report.Table("Settings", choices),
            report.Table("Versions", report.versions()),
        ],
    )
    print(f"report: {path}", flush=True)


def _drawn(grid: Grid, field: Float[np.ndarray, "lx ly"]) -> Any:
    return grid.gather(field, math.ceil(max(grid.shape) / _MOST_PIXELS))


def _edge(settings: Settings) -> str:
    return "u = 0 on its boundary" if settings.boundary == "zero" else "insulated"
