"""Run the heat application, from settings to report."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import mpigrad
from mpigrad import checkpoint
from mpigrad.collective_errors import call_on_root
from mpigrad.communicator import Communicator, resolve
from mpigrad.grid import Grid
from mpigrad_apps.fitting import TrainingRecord, prepare_training, train
from mpigrad_apps.grace import hold_grace_time
from mpigrad_apps.heat.experiment import Experiment, make_experiment
from mpigrad_apps.heat.inverse import inverse_problem
from mpigrad_apps.heat.outputs import write_estimation, write_film
from mpigrad_apps.heat.settings import Settings
from mpigrad_apps.heat.simulation import simulate
from mpigrad_apps.output_directory import prepare_output, resume_settings

__all__ = ["HeatResult", "run"]


@dataclasses.dataclass(frozen=True)
class HeatResult:
    """The result of `run`: this rank's tiles, and values that are the same on all ranks.

    Attributes
    ----------
    settings, grid
        The settings and the grid.
    kappa, true_kappa
        This rank's tiles, shape (lx, ly): kappa as estimated, or as given in a forward run.
    history, ending
        The records of the training, and the reason why the run ended.
    report
        Path of the report.
    """

    settings: Settings
    grid: Grid
    kappa: NDArray[np.float64]
    true_kappa: NDArray[np.float64]
    history: tuple[TrainingRecord, ...]
    ending: str
    report: pathlib.Path


def run(settings: Settings, comm: Communicator | None = None) -> HeatResult:
    """Simulate the heat or recover kappa, show the progress, and write the report (collective).

    The run writes into `settings.out`: report.html and its pictures, fields.zarr and settings.json.
    A forward run adds heat.gif. An inverse run adds history.jsonl, restart/ and the parameters
    (network.eqx or cells.npy). The file of the parameters is complete at any time and is replaced
    every few seconds. With `settings.resume` the run continues from restart/. When asked to stop
    (SIGTERM, SIGINT, SIGUSR1, or the launcher's Ctrl-C), it finishes its iteration or frame and
    writes everything.

    Parameters
    ----------
    settings
        The options of `mpigrad run heat`.
    comm
        The ranks that take part; by default all ranks.

    Raises
    ------
    ValueError, OSError
        On every rank, before the first step, if the settings, the model file or the output
        directory are not valid.
    jax.errors.JaxRuntimeError
        On every rank, before the first step, if the time step is not stable.
    """
    comm = resolve(comm)
    call_on_root(comm, settings.check)
    with jax.enable_x64(True):
        if settings.unknown == "nothing":
            return _follow(settings, comm)
        return _estimate(settings, comm)


def _follow(settings: Settings, comm: Communicator) -> HeatResult:
    plan = make_experiment(settings, comm)
    prepare_output(settings, settings.out, comm)
    _announce(plan, "")
    # Nothing is saved before the report, so the launcher waits for a frame, too.
    with checkpoint.listen(), hold_grace_time(comm):
        film = simulate(plan, settings.frames)
        write_film(settings, plan, film)
    kappa = np.asarray(plan.kappa)
    path = settings.out / "report.html"
    return HeatResult(settings, plan.grid, kappa, kappa, (), film.ending, path)


def _estimate(settings: Settings, comm: Communicator) -> HeatResult:
    problem = inverse_problem(settings, comm)
    prepare_output(settings, settings.out, comm)
    plan, values = problem.experiment, problem.parametrization
    count = sum(comm.mpi.allgather(len(problem.thermometers)))
    _announce(plan, f", {count} thermometers")
    parameters = values.first(1.0, settings.seed)
    if settings.restart is not None:
        parameters = values.load(settings.restart)
    largest_error = mpigrad.jit(lambda p: jnp.max(jnp.abs(values.kappa(p) - plan.kappa)))

    def error(parameters: Any) -> float:
        return max(comm.mpi.allgather(float(largest_error(parameters))))

    with checkpoint.listen():
        prepare_training(settings.out, comm, settings.resume)
        trained = train(
            problem.loss_share,
            parameters,
            settings.iterations,
            comm,
            memory=settings.memory,
            out=settings.out,
            save=lambda best: values.save(settings.out / values.file_name, best),
            error=error,
            about=resume_settings(settings),
            advice="The time step is not stable with them. Increase --steps, or use --theta 0.5",
        )
        with hold_grace_time(comm):
            kappa = np.asarray(mpigrad.jit(values.kappa)(trained.parameters))
            path = settings.out / "report.html"
            result = HeatResult(
                settings,
                plan.grid,
                kappa,
                np.asarray(plan.kappa),
                trained.history,
                trained.ending,
                path,
            )
            write_estimation(settings, problem, kappa, trained.history, trained.ending)
    return result


def _announce(plan: Experiment, more: str) -> None:
    grid, model = plan.grid, plan.model
    if grid.comm.rank == 0:
        print(
            f"heat: {grid.shape[0]} x {grid.shape[1]} cells in {' x '.join(map(str, grid.dims))} "
            f"tiles on {grid.comm.size} rank{'s' * (grid.comm.size > 1)}, {model.steps} time steps "
            f"of {model.dt:.3g}, theta = {model.theta:g}{more}",
            flush=True,
        )
