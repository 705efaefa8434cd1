"""Run the Poisson application, from settings to report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpigrad
from mpigrad import checkpoint, sparse
from mpigrad.communicator import Communicator, resolve
from mpigrad.runtime.native import communication_seconds
from mpigrad_apps.fitting import prepare_training, train
from mpigrad_apps.grace import hold_grace_time
from mpigrad_apps.output_directory import prepare_output, resume_settings
from mpigrad_apps.poisson.inverse import InverseProblem, best_constant, inverse_problem
from mpigrad_apps.poisson.outputs import write_outputs
from mpigrad_apps.poisson.result import PoissonResult
from mpigrad_apps.poisson.settings import Settings

__all__ = ["run"]


def run(settings: Settings, comm: Communicator | None = None) -> PoissonResult:
    """Recover kappa, show the progress, and write the report (collective).

    The run writes into `settings.out`: report.html and its pictures, fields.zarr, history.jsonl,
    settings.json, restart/, and the parameters (network.eqx or cells.npy). The file of the
    parameters is complete at any time and is replaced every few seconds. When asked to stop
    (SIGTERM, SIGINT, SIGUSR1, or the launcher's Ctrl-C), the run finishes its iteration and writes
    everything. With `settings.resume` it continues from there.

    Parameters
    ----------
    settings
        The options of `mpigrad run poisson`.
    comm
        The ranks that take part; by default all ranks.

    Raises
    ------
    ValueError, OSError
        On every rank, before the training, if the settings, the data file or the output directory
        are not valid.
    RuntimeError
        If a linear solve fails. The parameters reached so far are saved.
    """
    comm = resolve(comm)
    with jax.enable_x64(True):
        problem = inverse_problem(settings, comm)
        prepare_output(settings, settings.out, comm)
        values = problem.parametrization
        constant = None
        if settings.data is not None or settings.kappa == "cells":
            constant = best_constant(problem)
        if settings.restart is not None:
            parameters = values.load(settings.restart)
        else:
            parameters = values.first(constant, settings.seed)
        if comm.rank == 0:
            _announce(problem)
        with checkpoint.listen():
            before = _clocks()
            prepare_training(settings.out, comm, settings.resume)
            keep = settings.guesses
            trained = train(
                problem.guessed_loss_share if keep else problem.loss_share,
                parameters,
                settings.iterations,
                comm,
                memory=settings.memory,
                # The parameters of cells are the logarithms of kappa.
                bounds=settings.bounds and tuple(map(math.log, settings.bounds)),
                guesses=sparse.Guesses.empty(problem.model.rhs, keep) if keep else None,
                out=settings.out,
                save=lambda best: values.save(settings.out / values.file_name, best),
                error=_error_of(problem),
                about=resume_settings(settings),
                advice="the linear solve failed. Start from other parameters (--seed, --restart)",
            )
            with hold_grace_time(comm):
                seconds = _mean_seconds(comm, before)
                kappa = mpigrad.jit(values.kappa)(trained.parameters)
                u = mpigrad.jit(lambda k: problem.model.solution(k, problem.solver))(kappa)
                error = _error_of(problem)
                result = PoissonResult(
                    settings,
                    problem.model.grid,
                    trained.parameters,
                    np.asarray(kappa),
                    np.asarray(u),
                    problem.true_kappa,
                    trained.history,
                    trained.ending,
                    None if error is None else error(trained.parameters),
                    seconds,
                    settings.out / "report.html",
                )
                write_outputs(problem, result)
    return result


def _announce(problem: InverseProblem) -> None:
    grid, seen = problem.model.grid, problem.observations
    tiles = " x ".join(map(str, grid.dims))
    print(
        f"poisson: {grid.shape[0]} x {grid.shape[1]} cells in {tiles} tiles on {grid.comm.size} "
        f"rank{'s' * (grid.comm.size > 1)}, {seen.count} observations, "
        f"solver {type(problem.solver).__name__}",
        flush=True,
    )


def _error_of(problem: InverseProblem) -> Callable[[Any], float] | None:
    """Return a function for the largest error of kappa over all ranks, or None."""
    true = problem.true_kappa
    if true is None:
        return None
    local = mpigrad.jit(lambda p: jnp.max(jnp.abs(problem.parametrization.kappa(p) - true)))
    comm = problem.model.grid.comm
    return lambda parameters: max(comm.mpi.allgather(float(local(parameters))))


def _clocks() -> tuple[float, float, float]:
    solver = sparse.solver_seconds()
    return time.monotonic(), communication_seconds(), solver["setup"] + solver["solve"]


def _mean_seconds(comm: Communicator, before: tuple[float, float, float]) -> dict[str, float]:
    spent = np.subtract(_clocks(), before)
    total, communication, multigrid = np.mean(comm.mpi.allgather(spent), axis=0)
    return {
        "total": float(total),
        "multigrid": float(multigrid),
        "communication": float(communication),
        "rest": float(total - multigrid - communication),
    }
