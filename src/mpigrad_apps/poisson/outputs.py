"""The output of a run: fields, pictures and the report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from mpigrad import sparse
from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad_apps import report
from mpigrad_apps.field_files import write_field_files
from mpigrad_apps.fitting import seconds_per_iteration
from mpigrad_apps.poisson.inverse import InverseProblem
from mpigrad_apps.poisson.observations import Data
from mpigrad_apps.poisson.result import PoissonResult

__all__ = ["write_outputs"]

_MOST_PIXELS = 600  # along an axis of a map; larger fields are thinned out


def write_outputs(problem: InverseProblem, result: PoissonResult) -> None:
    """Write fields.zarr, the pictures and report.html into the output directory (collective)."""
    grid = result.grid
    fields = {"kappa": result.kappa, "u": result.u}
    if result.true_kappa is not None:
        fields["true_kappa"] = result.true_kappa
    write_field_files(
        result.settings.out / "fields",
        grid,
        fields,
        {"equation": "div(kappa grad u) = f, u = 0 on the boundary", "ending": result.ending},
        vtk=result.settings.vtk,
    )
    stride = math.ceil(max(grid.shape) / _MOST_PIXELS)
    drawn = {name: grid.gather(field, stride) for name, field in fields.items()}
    if problem.data is None:
        drawn["observed"] = grid.gather(problem.observations.tile(), stride)
    ends = grid.comm.mpi.allgather((float(result.kappa.min()), float(result.kappa.max())))
    with raise_on_all_ranks(grid.comm):
        if grid.comm.rank == 0:
            span = min(low for low, _ in ends), max(high for _, high in ends)
            report.write_report(
                result.settings.out,
                "Diffusivity from observations of a Poisson equation",
                _summary(problem, result),
                _pictures(result, drawn, problem.data),
                _tables(problem, result, span),
            )
            print(f"report: {result.report}", flush=True)


def _pictures(
    result: PoissonResult, drawn: Mapping[str, NDArray[Any] | None], data: Data | None
) -> list[report.Picture]:
    whole = {name: field for name, field in drawn.items() if field is not None}
    kappa, u = whole["kappa"], whole["u"]
    if "true_kappa" in whole:
        true = whole["true_kappa"]
        limits = float(min(kappa.min(), true.min())), float(max(kappa.max(), true.max()))
        first = report.maps(
            "kappa",
            "True and estimated κ, in the same colours, and their difference.",
            [
                report.Panel("true κ", true, limits, quantity="κ"),
                report.Panel("estimated κ", kappa, limits, quantity="κ"),
                report.Panel(
                    "estimated − true κ", kappa - true, diverging=True, quantity="error of κ"
                ),
            ],
        )
    else:
        first = report.maps(
            "kappa", "The estimated κ.", [report.Panel("estimated κ", kappa, quantity="κ")]
        )
    pictures = [first]
    solution = report.Panel("u for the estimated κ", u, quantity="u")
    if data is None:
        pictures.append(
            report.maps(
                "u",
                "The solution u for the estimated κ, and the observations. Other cells are white.",
                [solution, report.Panel("observed u", whole["observed"], quantity="u")],
            )
        )
    else:
        pictures.append(report.maps("u", "The solution u for the estimated κ.", [solution]))
        pictures.append(
            report.points(
                "observed",
                "The observations at their points.",
                "observed u",
                data.coordinates,
                data.values,
            )
        )
    history = result.history
    lines: dict[str, tuple[list[int], list[float]]] = {}
    every = [record.iteration for record in history]
    lines["loss"] = every, [record.loss for record in history]
    lines["norm of its gradient"] = every, [record.gradient_norm for record in history]
    errors = [(r.iteration, r.error) for r in history if r.error is not None]
    if errors:
        lines["largest error of κ"] = [i for i, _ in errors], [error for _, error in errors]
    pictures.append(report.curve("loss", "The training, iteration by iteration.", lines))
    return pictures


def _summary(problem: InverseProblem, result: PoissonResult) -> str:
    best = min(result.history, key=lambda record: record.loss)  # the result has its parameters
    means = "a neural network" if result.settings.kappa == "network" else "one value per cell"
    text = (
        f"κ in ∇·(κ∇u) = f on the unit square, u = 0 on its boundary, given by {means} and "
        f"estimated from {problem.observations.count} observations of u. "
        f"L-BFGS: {result.ending}, loss {best.loss:.3e}"
    )
    if result.largest_error is not None:
        text += f", largest error of κ {result.largest_error:.4f}"
    return text + "."


def _tables(
    problem: InverseProblem, result: PoissonResult, span: tuple[float, float]
) -> list[report.Table]:
    grid, settings, seconds = result.grid, result.settings, result.seconds
    smallest, largest = (
        grid.smallest_tile,
        tuple(math.ceil(n / p) for n, p in zip(grid.shape, grid.dims, strict=True)),
    )
    sizes = f"{largest[0]} x {largest[1]} cells"
    if smallest != largest:
        sizes = f"{smallest[0]} x {smallest[1]} to {sizes}"
    choices = {
        field.name: value
        for field in dataclasses.fields(settings)
        if (value := getattr(settings, field.name)) is not None
    }
    choices["cells"] = f"{grid.shape[0]} x {grid.shape[1]}"
    best = min(result.history, key=lambda record: record.loss)  # the result has its parameters
    outcome = {
        "ended": result.ending,
        "loss": f"{best.loss:.6e}",
        "norm of its gradient": f"{best.gradient_norm:.3e}",
        "evaluations of loss and gradient": result.history[-1].evaluations,
        "smallest, largest κ": f"{span[0]:.4g}, {span[1]:.4g}",
    }
    if result.largest_error is not None:
        outcome["largest error of κ"] = f"{result.largest_error:.5f}"
    timing = {
        "training": f"{seconds['total']:.1f} s",
        "the first evaluation (compiles)": f"{result.history[0].seconds:.1f} s",
        "one iteration (median)": f"{seconds_per_iteration(result.history):.3f} s",
        "in multigrid": f"{seconds['multigrid']:.1f} s",
        "in communication": f"{seconds['communication']:.1f} s",
        "the rest": f"{seconds['rest']:.1f} s",
    }
    solves = sparse.solver_seconds()
    timing["set-ups / solves of multigrid"] = f"{solves['setups']} / {solves['solves']}"
    parallel = {
        "ranks": grid.comm.size,
        "tiles": f"{grid.dims[0]} x {grid.dims[1]}",
        "a tile": sizes,
        "solver": str(problem.solver),
    }
    return [
        report.Table("Result", outcome),
        report.Table("Time (mean over ranks)", timing),
        report.Table("Ranks", parallel),
        report.Table("Settings", choices),
        report.Table("Versions", report.versions()),
    ]
