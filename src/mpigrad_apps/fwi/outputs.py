"""The output of an inversion: fields, pictures and the report."""

from __future__ import annotations

import dataclasses
import itertools

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad_apps import report
from mpigrad_apps.field_files import write_field_files
from mpigrad_apps.fitting import seconds_per_iteration
from mpigrad_apps.fwi.inversion import Inversion
from mpigrad_apps.fwi.model_pictures import gather_sections, model_picture, result_tile
from mpigrad_apps.fwi.result import Result
from mpigrad_apps.shots.pictures import clip_of, gather_panel, receiver_line

__all__ = ["UNITS", "write_outputs"]

UNITS = {"vp": "m/s", "vs": "m/s", "rho": "kg/m3", "lambda": "Pa", "mu": "Pa"}


def write_outputs(problem: Inversion, result: Result) -> None:
    """Write fields.zarr, the pictures and report.html into the output directory (collective)."""
    group, out = problem.group, result.settings.out
    with raise_on_all_ranks(group.comm):
        sections = None
        if group.is_first:  # one group writes, and an error is raised on all its ranks
            _write_fields(problem, result)
            sections = gather_sections(problem, result)
    with raise_on_all_ranks(group.comm):
        if group.comm.rank == 0:
            assert sections is not None
            pictures = [*map(model_picture, sections), _gathers(problem, result), _curves(result)]
            report.write_report(
                out, "Full-waveform inversion", _summary(problem, result), pictures,
                _tables(problem, result),
            )  # fmt: skip
            print(f"report: {result.report}", flush=True)


def _write_fields(problem: Inversion, result: Result) -> None:
    group, fields = problem.group, {}
    for unknown in problem.parametrization.unknowns:
        fields[unknown.name] = result_tile(problem, result, unknown.name)
        fields[f"start_{unknown.name}"] = problem.tile(unknown.start)
        if problem.inputs.truth is not None:
            fields[f"true_{unknown.name}"] = problem.tile(problem.inputs.truth[unknown.name])
    about = {"ending": result.ending, "spacing": list(problem.experiment.spacing)}
    axes = dict.fromkeys("xyz"[: group.grid.ndim], "m")
    units = axes | {name: UNITS[name.split("_")[-1]] for name in fields}
    settings = result.settings
    write_field_files(
        settings.out / "fields", group.grid, fields, about, vtk=settings.vtk, units=units
    )


def _gathers(problem: Inversion, result: Result) -> report.Picture:
    """Return the picture of the middle shot of rank 0's group, in volumes along one line."""
    shot = len(problem.group.shots) // 2
    experiment, physics = problem.group.experiment, problem.group.physics
    receivers = experiment.receivers[shot % len(experiment.receivers)]
    line = receiver_line(receivers, experiment.sources[shot, 0])
    recorded, start, end = (
        gathers[shot, 0][line] for gathers in (problem.recorded, *result.gathers)
    )
    where = ""
    if receivers.shape[1] == 3:
        where = f", receivers at y = {receivers[line][0, 1]:.4g} m"
    quantity = f"{physics.components[0]} ({physics.unit})"
    how = experiment.dt, receivers[line], quantity, clip_of(recorded)
    return report.maps(
        "gathers",
        f"Shot {problem.group.shots[shot] + 1}, {physics.components[0]}{where}: the "
        "recording, and the residuals of the start and of the result, in the same colours.",
        [
            gather_panel("recorded", recorded, *how),
            gather_panel("start − recorded", start - recorded, *how),
            gather_panel("result − recorded", end - recorded, *how),
        ],
    )


def _curves(result: Result) -> report.Picture:
    """Return the curves of loss and error. Each stage has its own loss, which rounds continue."""
    lines: dict[str, tuple[list[int], list[float]]] = {}
    number, errors = 0, []
    corners = (*result.settings.frequencies, None)
    for stage, records in itertools.groupby(result.history, key=lambda r: r.stage):
        corner = corners[stage // result.settings.rounds]
        label = "loss" if corner is None else f"loss below {corner:g} Hz"
        points = [(number + r.iteration, r) for r in records]
        numbers, losses = lines.setdefault(label, ([], []))
        numbers += [n for n, _ in points]
        losses += [r.loss for _, r in points]
        errors += [(n, r.error) for n, r in points if r.error is not None]
        number = points[-1][0]
    if errors:
        lines["error of the model"] = [n for n, _ in errors], [e for _, e in errors]
    return report.curve("loss", "The inversion, iteration by iteration.", lines)


def _summary(problem: Inversion, result: Result) -> str:
    means = "a neural network" if result.settings.unknown == "network" else "one value per cell"
    first, last = result.misfits
    text = (
        f"{', '.join(u.name for u in problem.parametrization.unknowns)} from "
        f"{problem.experiment.n_shots} shots of {result.settings.physics} waves, as {means}. "
        f"L-BFGS: {result.ending}; the misfit is {first / last:.4g} times smaller than the start's"
    )
    if result.errors is not None:
        text += f", the model's error {result.errors[1]:.4f} (start: {result.errors[0]:.4f})"
    return text + "."


def _tables(problem: Inversion, result: Result) -> list[report.Table]:
    whole, group, settings = problem.experiment, problem.group, result.settings
    first, last = result.misfits
    outcome: dict[str, object] = {
        "ended": result.ending,
        "misfit of the start": f"{first:.6e}",
        "misfit of the result": f"{last:.6e}",
        "ratio": f"{first / last:.5g}",
    }
    if result.errors is not None:
        outcome["error of the start"] = f"{result.errors[0]:.5f}"
        outcome["error of the result"] = f"{result.errors[1]:.5f}"
    for unknown in problem.parametrization.unknowns:
        low, high = result.extremes[unknown.name]
        outcome[f"smallest, largest {unknown.name}"] = f"{low:.5g}, {high:.5g}"
        outcome[f"bounds of {unknown.name}"] = f"{unknown.low:.5g}, {unknown.high:.5g}"
    evaluations = {record.stage: record.evaluations for record in result.history}
    outcome["evaluations of loss and gradient"] = sum(evaluations.values())
    experiment = {
        "cells": " x ".join(map(str, whole.shape)),
        "size of a cell": " x ".join(f"{h:.5g} m" for h in whole.spacing),
        "steps": f"{whole.steps} of {whole.dt:.6g} s",
        "shots, receivers of a shot": f"{whole.n_shots}, {whole.receivers.shape[1]}",
        "wavelet": whole.wavelet,
    }
    timing = {
        "ranks": group.comm.size,
        "groups": group.n_groups,
        "tiles of a group": " x ".join(map(str, group.grid.dims)),
        "training": f"{result.seconds:.1f} s",
        "one iteration (median)": f"{seconds_per_iteration(result.history):.3f} s",
    }
    choices = {
        field.name: value
        for field in dataclasses.fields(settings)
        if (value := getattr(settings, field.name)) not in (None, ())
    }
    return [
        report.Table("Result", outcome),
        report.Table("Experiment", experiment),
        report.Table("Ranks and time", timing),
        report.Table("Settings", choices),
        report.Table("Versions", report.versions()),
    ]
