"""The output of an inversion: fields, pictures and the report."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from jaxtyping import Float

from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad_apps import report
from mpigrad_apps.field_files import write_field_files
from mpigrad_apps.fitting import seconds_per_iteration
from mpigrad_apps.fwi.inversion import Inversion
from mpigrad_apps.fwi.result import Result
from mpigrad_apps.shots.pictures import clip_of, gather_panel, section

__all__ = ["write_outputs"]

_UNITS = {"vp": "m/s", "vs": "m/s", "rho": "kg/m3", "lambda": "Pa", "mu": "Pa"}


def write_outputs(problem: Inversion, result: Result) -> None:
    """Write fields.zarr, the pictures and report.html into the output directory (collective)."""
    group, out = problem.group, result.settings.out
    with raise_on_all_ranks(group.comm):
        if 0 in group.shots:  # one group writes, and an error is raised on all its ranks
            _write_fields(problem, result)
    with raise_on_all_ranks(group.comm):
        if group.comm.rank == 0:
            report.write_report(
                out, "Full-waveform inversion", _summary(problem, result),
                _pictures(problem, result), _tables(problem, result),
            )  # fmt: skip
            print(f"report: {result.report}", flush=True)


def _write_fields(problem: Inversion, result: Result) -> None:
    group, window = problem.group, problem.group.grid.slices
    fields = {}
    for unknown in problem.parametrization.unknowns:
        fields[unknown.name] = result.fields[unknown.name][window]
        fields[f"start_{unknown.name}"] = unknown.start[window]
        if problem.inputs.truth is not None:
            fields[f"true_{unknown.name}"] = problem.inputs.truth[unknown.name][window]
    about = {"ending": result.ending, "spacing": list(problem.experiment.spacing)}
    units = {"x": "m", "y": "m"} | {name: _UNITS[name.split("_")[-1]] for name in fields}
    settings = result.settings
    write_field_files(
        settings.out / "fields", group.grid, fields, about, vtk=settings.vtk, units=units
    )


def _pictures(problem: Inversion, result: Result) -> list[report.Picture]:
    pictures = [_model(problem, result, k) for k in range(len(problem.parametrization.unknowns))]
    # Rank 0 has the gathers of its group. The shot in the middle is shown.
    shot = len(problem.group.shots) // 2
    recorded, start, end = (gathers[shot, 0] for gathers in (problem.recorded, *result.gathers))
    experiment, physics = problem.group.experiment, problem.group.physics
    receivers = experiment.receivers[shot % len(experiment.receivers)]
    quantity = f"{physics.components[0]} ({physics.unit})"
    how = experiment.dt, receivers, quantity, clip_of(recorded)
    pictures.append(
        report.maps(
            "gathers",
            f"Shot {problem.group.shots[shot] + 1}, {physics.components[0]}: the "
            "recording, and the residuals of the start and of the result, in the same colours.",
            [
                gather_panel("recorded", recorded, *how),
                gather_panel("start − recorded", start - recorded, *how),
                gather_panel("result − recorded", end - recorded, *how),
            ],
        )
    )
    return [*pictures, _curves(result)]


def _model(problem: Inversion, result: Result, index: int) -> report.Picture:
    unknown = problem.parametrization.unknowns[index]
    name, size = unknown.name, problem.experiment.size
    start, end = np.asarray(unknown.start), result.fields[unknown.name]
    if problem.inputs.truth is None:
        limits = _span(start, end)
        return report.maps(
            name,
            f"{name} of the start and of the result.",
            [
                section(f"start: {name}", start, size, limits),
                section(f"result: {name}", end, size, limits),
            ],
        )
    true = np.asarray(problem.inputs.truth[name])
    limits = _span(true, true)
    return report.maps(
        name,
        f"True {name}, the start and the result in the same colours, and the difference.",
        [
            section(f"true {name}", true, size, limits),
            section(f"start: {name}", start, size, limits),
            section(f"result: {name}", end, size, limits),
            section(f"result − true {name}", end - true, size, diverging=True),
        ],
        columns=2,
    )


def _span(*fields: Float[np.ndarray, "nx ny"]) -> tuple[float, float]:
    return float(min(f.min() for f in fields)), float(max(f.max() for f in fields))


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
        field = result.fields[unknown.name]
        outcome[f"smallest, largest {unknown.name}"] = f"{field.min():.5g}, {field.max():.5g}"
        outcome[f"bounds of {unknown.name}"] = f"{unknown.low:.5g}, {unknown.high:.5g}"
    evaluations = {record.stage: record.evaluations for record in result.history}
    outcome["evaluations of loss and gradient"] = sum(evaluations.values())
    experiment = {
        "cells": f"{whole.shape[0]} x {whole.shape[1]}",
        "size of a cell": f"{whole.spacing[0]:.5g} m x {whole.spacing[1]:.5g} m",
        "steps": f"{whole.steps} of {whole.dt:.6g} s",
        "shots, receivers of a shot": f"{whole.n_shots}, {whole.receivers.shape[1]}",
        "wavelet": whole.wavelet,
    }
    timing = {
        "ranks": group.comm.size,
        "groups": group.n_groups,
        "tiles of a group": f"{group.grid.dims[0]} x {group.grid.dims[1]}",
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
