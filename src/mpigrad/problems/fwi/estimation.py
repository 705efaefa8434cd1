"""A run from settings to report."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad.communicator import Communicator, resolve
from mpigrad.problems.directory import prepare
from mpigrad.problems.files import write_whole
from mpigrad.problems.fwi.inversion import Inversion, inversion
from mpigrad.problems.fwi.outputs import write_outputs
from mpigrad.problems.fwi.restart import load_restart, save_restart
from mpigrad.problems.fwi.result import Result
from mpigrad.problems.fwi.settings import Settings
from mpigrad.problems.lbfgs import LBFGS
from mpigrad.problems.training import Standing, Trained, train

__all__ = ["run"]


def run(settings: Settings, comm: Communicator | None = None) -> Result:
    """Find the model, showing the progress, and write the report (collective).

    Writes into `settings.out`: report.html and its pictures, fields.zarr (found, start and true
    fields), model.npz (what `--initial` and `--model` read), history.jsonl, settings.json and
    restart.bin; the last is on disk, whole, every few seconds from the beginning, as is model.npz.
    When asked to stop (SIGTERM, SIGINT, SIGUSR1, or the launcher's Ctrl-C), it ends after the
    iteration it is in and writes everything; `--restart` goes on from there.

    Raises
    ------
    ValueError, OSError, RuntimeError
        On every rank, before the training, where settings, files or the time step make no sense.
    """
    comm = resolve(comm)
    with jax.enable_x64(True):
        problem = inversion(settings, comm)
        prepare(settings, settings.out, comm)
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


def _stages(problem: Inversion, comm: Communicator) -> Trained:
    """From low frequencies to all of them, each stage from where the one before has led."""
    settings, values = problem.settings, problem.parametrization
    corners = (*settings.frequencies, None)
    save = functools.partial(_save, problem)
    parameters, earlier, resume = values.first(settings.seed), (), None
    trained, stage = None, 0
    if settings.restart is not None:
        optimizer = LBFGS(lambda _: (None, None), settings.memory, comm=comm)  # type: ignore
        resume = load_restart(settings.restart, values, problem.digest, optimizer, comm)
        stage = resume.history[-1].stage
        if stage >= len(corners):
            raise ValueError(f"--restart: it is in stage {stage + 1}, and there are {len(corners)}")
    for number, corner in list(enumerate(corners))[stage:]:
        if comm.rank == 0 and len(corners) > 1:
            band = "all frequencies" if corner is None else f"below {corner:g} Hz"
            print(f"fwi: stage {number + 1} of {len(corners)}: {band}", flush=True)
        loss = functools.partial(problem.value_and_grad, problem.misfit(corner))
        trained = train(
            LBFGS(loss, settings.memory, comm=comm),
            parameters,
            settings.iterations,
            comm,
            save=save,
            history_file=settings.out / "history.jsonl",
            error=None if problem.truth is None else problem.error,  # type: ignore[arg-type]
            stage=number,
            earlier=earlier,
            resume=resume,
            advice="is the start a model that this time step is stable for (--dt, --initial)?",
        )
        parameters, earlier, resume = trained.parameters, trained.history, None
        if trained.stopped:
            break
    assert trained is not None
    return trained


def _save(problem: Inversion, standing: Standing) -> None:
    out = problem.settings.out
    save_restart(out / "restart.bin", problem.parametrization, problem.digest, standing)
    everywhere = slice(None), slice(None)
    fields = problem.parametrization.fields(standing.best, everywhere)
    arrays: dict[str, Any] = {"spacing": np.asarray(problem.experiment.spacing), **fields}
    write_whole(out / "model.npz", lambda file: np.savez(file, **arrays))


def _result(problem: Inversion, trained: Trained, seconds: float) -> Result:
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
