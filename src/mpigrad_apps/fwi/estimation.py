"""A run of an inversion, from settings to report."""

from __future__ import annotations

import functools
import hashlib
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import mpigrad
from mpigrad import checkpoint
from mpigrad.collective_errors import raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.io import write_zarr
from mpigrad.profiling import Progress
from mpigrad.runtime import write_atomically
from mpigrad_apps.fitting import TrainingResult, prepare_training, train
from mpigrad_apps.fwi.inversion import Inversion, prepare_inversion
from mpigrad_apps.fwi.outputs import UNITS, write_outputs
from mpigrad_apps.fwi.parametrization import Parametrization
from mpigrad_apps.fwi.result import Result
from mpigrad_apps.fwi.settings import Settings
from mpigrad_apps.fwi.shot_sampling import check_shot_sampling, sample_shots
from mpigrad_apps.grace import hold_grace_time
from mpigrad_apps.output_directory import prepare_output

__all__ = ["run"]


def run(settings: Settings, comm: Communicator | None = None) -> Result:
    """Find the model, show the progress, and write the report (collective).

    The files in `settings.out` are report.html and its pictures, fields.zarr (result, start and
    true fields), model.npz (for `--initial` and `--model`), history.jsonl, settings.json and
    restart/. model.npz is replaced by the current model every few seconds. If the run is stopped
    (SIGTERM, SIGINT, SIGUSR1, or Ctrl-C of the launcher), it ends after the current iteration and
    writes everything. With `settings.resume` it continues from there.

    Raises
    ------
    ValueError, OSError, RuntimeError
        On every rank, before the training, if settings, files or the time step are not valid.
    """
    comm = resolve(comm)
    with jax.enable_x64(True):
        problem = prepare_inversion(settings, comm)
        check_shot_sampling(problem, settings.subset, settings.encode)
        prepare_output(settings, settings.out, comm)
        if comm.rank == 0:
            summary = problem.group.summary("fwi", problem.experiment.n_shots)
            print(f"{summary}, {problem.n_unknowns} unknowns", flush=True)
        started = time.monotonic()
        with checkpoint.listen():
            trained = _stages(problem, settings, comm)
            seconds = time.monotonic() - started
            with hold_grace_time(comm):
                result = _result(problem, settings, trained, seconds)
                write_outputs(problem, result)
    return result


def _stages(problem: Inversion, settings: Settings, comm: Communicator) -> TrainingResult:
    """Train from low to all frequencies, round by round, each from the result of the one before."""
    values, rounds = problem.parametrization, settings.rounds
    corners = (*settings.frequencies, None)
    parameters, trained = values.initial(settings.seed), None
    prepare_training(settings.out, comm, settings.resume)
    stages = [(corner, turn) for corner in corners for turn in range(rounds)]
    progress = Progress(settings.iterations, comm.rank, stages=len(stages))
    for stage, (corner, turn) in enumerate(stages):
        if stage > 0:
            progress.next_stage()
        if comm.rank == 0 and turn == 0 and len(corners) > 1:
            band = "all frequencies" if corner is None else f"below {corner:g} Hz"
            print(f"fwi: stage {stage // rounds + 1} of {len(corners)}: {band}", flush=True)
        part = _with_shots(problem, settings, stage)
        trained = train(
            functools.partial(part.loss_share, part.misfit(corner)),
            parameters,
            settings.iterations,
            comm,
            memory=settings.memory,
            sharded=values.sharded,
            bounds=values.limits(),
            out=settings.out,
            save=functools.partial(_save, problem, settings.out),
            all_ranks_save=problem.layout.divided,
            error=None if problem.inputs.truth is None else problem.error,  # type: ignore[arg-type]
            stage=stage,
            progress=progress,
            about=_run_identity(values, problem.digest)
            | {"low pass": corner}
            | _sampling_identity(settings),
            advice="Check that the time step is stable for the start (--dt, --initial).",
        )
        parameters = trained.parameters
        if trained.stopped:
            break
    assert trained is not None
    return trained


def _with_shots(problem: Inversion, settings: Settings, stage: int) -> Inversion:
    """Return the inversion with the shots of a stage's round."""
    if settings.subset is None and not settings.encode:
        return problem
    return sample_shots(problem, settings.subset, settings.encode, (settings.seed, stage))


def _sampling_identity(settings: Settings) -> dict[str, Any]:
    """Return what a run with sampled shots and its saves must have in common as well."""
    if settings.subset is None and not settings.encode:
        return {}
    names = ("rounds", "subset", "encode", "seed", "groups")
    return {name: getattr(settings, name) for name in names}


def _run_identity(values: Parametrization, objective: str) -> dict[str, Any]:
    """Return the values that a run and its saves must have in common (collective)."""
    digest = hashlib.sha256()
    values.layout.add_to(digest, values.active)
    for unknown in values.unknowns:
        values.layout.add_to(digest, unknown.start)
        digest.update(repr((unknown.low, unknown.high)).encode())
    return {
        "unknown": type(values).__name__,
        "fields": [unknown.name for unknown in values.unknowns],
        "cells": list(values.shape),
        "start, bounds and mask": digest.hexdigest()[:16],
        "shots, data and weights": objective,
    }


def _save(problem: Inversion, out: pathlib.Path, parameters: Any) -> None:
    """Write the model: model.npz on this rank, or of a volume model.zarr (collective)."""
    fields = problem.parametrization.fields
    spacing = problem.experiment.spacing
    if problem.layout.divided:
        tiles = jax.tree.map(np.asarray, problem.compiled_tiles(parameters))
        with raise_on_all_ranks(problem.group.comm):
            if problem.group.is_first:
                units = dict.fromkeys("xyz", "m") | {name: UNITS[name] for name in tiles}
                about = {"spacing": list(spacing)}
                write_zarr(out / "model.zarr", problem.grid, tiles, about, units=units)
        return
    everywhere = problem.layout.held
    arrays: dict[str, Any] = {"spacing": np.asarray(spacing), **fields(parameters, everywhere)}
    write_atomically(out / "model.npz", lambda file: np.savez(file, **arrays))


def _result(
    problem: Inversion, settings: Settings, trained: TrainingResult, seconds: float
) -> Result:
    values, comm, group = problem.parametrization, problem.group.comm, problem.grid.comm
    first = values.initial(settings.seed)
    predict = mpigrad.jit(lambda parameters: problem.predict(problem.tiles(parameters)))
    start, end = (np.asarray(predict(p)) for p in (first, trained.parameters))
    misfit = problem.misfit(None)
    misfits = [
        comm.mpi.allreduce(float(misfit.group_share(jnp.asarray(d))) if group.rank == 0 else 0.0)
        for d in (start, end)
    ]
    errors = [problem.error(p) for p in (first, trained.parameters)]
    if problem.layout.divided:
        fields = problem.compiled_tiles(trained.parameters)
    else:
        fields = values.fields(trained.parameters, problem.layout.held)
    fields = jax.tree.map(np.asarray, fields)
    extremes = {
        name: (
            comm.mpi.allreduce(float(field.min()), MPI.MIN),
            comm.mpi.allreduce(float(field.max()), MPI.MAX),
        )
        for name, field in fields.items()
    }
    return Result(
        settings,
        trained.parameters,
        fields,
        extremes,
        trained.history,
        trained.ending,
        (misfits[0], misfits[1]),
        None if errors[0] is None or errors[1] is None else (errors[0], errors[1]),
        (start, end),
        seconds,
        settings.out / "report.html",
    )
