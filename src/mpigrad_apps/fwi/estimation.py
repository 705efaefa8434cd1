"""A run from settings to report."""

from __future__ import annotations

import functools
import hashlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad.communicator import Communicator, resolve
from mpigrad_apps.atomic_write import write_atomically
from mpigrad_apps.fitting import TrainingResult, prepare_training, train
from mpigrad_apps.fwi.inversion import Inversion, prepare_inversion
from mpigrad_apps.fwi.outputs import write_outputs
from mpigrad_apps.fwi.parametrization import Parametrization
from mpigrad_apps.fwi.result import Result
from mpigrad_apps.fwi.settings import Settings
from mpigrad_apps.output_directory import prepare_output

__all__ = ["run"]


def run(settings: Settings, comm: Communicator | None = None) -> Result:
    """Find the model, showing the progress, and write the report (collective).

    Writes into `settings.out`: report.html and its pictures, fields.zarr (found, start and true
    fields), model.npz (what `--initial` and `--model` read), which is on disk, whole, every few
    seconds from the beginning, history.jsonl, settings.json and restart/. When asked to stop
    (SIGTERM, SIGINT, SIGUSR1, or the launcher's Ctrl-C), it ends after the iteration it is in and
    writes everything; with `settings.resume` it goes on from there.

    Raises
    ------
    ValueError, OSError, RuntimeError
        On every rank, before the training, where settings, files or the time step make no sense.
    """
    comm = resolve(comm)
    with jax.enable_x64(True):
        problem = prepare_inversion(settings, comm)
        prepare_output(settings, settings.out, comm)
        if comm.rank == 0:
            announcement = problem.team.announcement("fwi", problem.experiment.n_shots)
            unknown = sum(leaf.size for leaf in jax.tree.leaves(problem.parametrization.first(0)))
            print(f"{announcement}, {unknown} unknowns", flush=True)
        begun = time.monotonic()
        trained = _stages(problem, comm)
        seconds = time.monotonic() - begun
        result = _result(problem, trained, seconds)
        write_outputs(problem, result)
    return result


def _stages(problem: Inversion, comm: Communicator) -> TrainingResult:
    """From low frequencies to all of them, each stage from where the one before has led."""
    settings, values = problem.settings, problem.parametrization
    corners = (*settings.frequencies, None)
    parameters, trained = values.first(settings.seed), None
    prepare_training(settings.out, comm, settings.resume)
    for number, corner in enumerate(corners):
        if comm.rank == 0 and len(corners) > 1:
            band = "all frequencies" if corner is None else f"below {corner:g} Hz"
            print(f"fwi: stage {number + 1} of {len(corners)}: {band}", flush=True)
        trained = train(
            functools.partial(problem.loss_share, problem.misfit(corner)),
            parameters,
            settings.iterations,
            comm,
            memory=settings.memory,
            out=settings.out,
            save=functools.partial(_save, problem),
            error=None if problem.truth is None else problem.error,  # type: ignore[arg-type]
            stage=number,
            about=_about(values, problem.digest) | {"low pass": corner},
            advice="is the start a model that this time step is stable for (--dt, --initial)?",
        )
        parameters = trained.parameters
        if trained.stopped:
            break
    assert trained is not None
    return trained


def _about(values: Parametrization, objective: str) -> dict[str, Any]:
    """What a run must have in common with the one from whose saves it goes on."""
    digest = hashlib.sha256(values.active.tobytes())
    for unknown in values.unknowns:
        digest.update(unknown.start.tobytes())
        digest.update(repr((unknown.low, unknown.high)).encode())
    return {
        "unknown": type(values).__name__,
        "fields": [unknown.name for unknown in values.unknowns],
        "cells": list(values.shape),
        "start, bounds and mask": digest.hexdigest()[:16],
        "shots, data and weights": objective,
    }


def _save(problem: Inversion, parameters: Any) -> None:
    everywhere = slice(None), slice(None)
    fields = problem.parametrization.fields(parameters, everywhere)
    arrays: dict[str, Any] = {"spacing": np.asarray(problem.experiment.spacing), **fields}
    write_atomically(problem.settings.out / "model.npz", lambda file: np.savez(file, **arrays))


def _result(problem: Inversion, trained: TrainingResult, seconds: float) -> Result:
    values, comm, group = problem.parametrization, problem.team.comm, problem.grid.comm
    first = values.first(problem.settings.seed)
    predict = mpigrad.jit(lambda parameters: problem.predict(problem.tiles(parameters)))
    start, end = (np.asarray(predict(p)) for p in (first, trained.parameters))
    measure = problem.misfit(None)
    misfits = [
        comm.mpi.allreduce(float(measure.of_group(jnp.asarray(d))) if group.rank == 0 else 0.0)
        for d in (start, end)
    ]
    errors = [problem.error(p) for p in (first, trained.parameters)]
    everywhere = slice(None), slice(None)
    fields = jax.tree.map(np.asarray, values.fields(trained.parameters, everywhere))
    return Result(
        problem.settings,
        trained.parameters,
        fields,
        trained.history,
        trained.ending,
        (misfits[0], misfits[1]),
        None if errors[0] is None or errors[1] is None else (errors[0], errors[1]),
        (start, end),
        seconds,
        problem.settings.out / "report.html",
    )
