"""Run the population application, from settings to report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from mpigrad import checkpoint, jobs, optimize
from mpigrad.collective_errors import call_on_root, raise_on_all_ranks
from mpigrad.communicator import Communicator, resolve
from mpigrad.profiling import Progress
from mpigrad_apps.grace import hold_grace_time
from mpigrad_apps.output_directory import prepare_output, remove_saves, resume_settings
from mpigrad_apps.population import records
from mpigrad_apps.population.diagnostics import Summary, summarize
from mpigrad_apps.population.kinetics import Kinetics, decay_rate
from mpigrad_apps.population.model import Model, Prior, Unknowns, log_density
from mpigrad_apps.population.outputs import Estimates, disagreement, write_draws, write_outputs
from mpigrad_apps.population.prediction import Prediction, predict_patient
from mpigrad_apps.population.records import Cohort
from mpigrad_apps.population.sampling import NUTS, Posterior
from mpigrad_apps.population.settings import Settings
from mpigrad_apps.population.simulation import Truth, simulate

__all__ = ["PopulationResult", "put_patients", "run"]

Density = Callable[[Unknowns], Array]

_SAVE_EVERY = 0.1  # minutes between saves
_DRAWN = 200  # number of draws for fits and individual parameters
_BLOCKS, _LARGEST_BLOCK = 8, 64
_JITTER = 0.1  # spread of the chains' starts around the mode, in logarithms and random effects


@dataclasses.dataclass(frozen=True)
class PopulationResult:
    """The result of `run`, the same on every rank.

    Attributes
    ----------
    settings, cohort
        The settings and the patients.
    truth
        The true values of simulated patients, or None for the user's patients.
    mode
        The mode of the posterior.
    posterior, summary
        The draws and their summary, or None and {} if nothing was drawn.
    report
        Path of the report.
    """

    settings: Settings
    cohort: Cohort
    truth: Truth | None
    mode: Unknowns
    posterior: Posterior | None
    summary: dict[str, Summary]
    report: pathlib.Path


def run(settings: Settings, comm: Communicator | None = None) -> PopulationResult:
    """Find the mode, sample the posterior, write the report (collective).

    The run writes into `settings.out`: report.html and its pictures, posterior.npz, patients.csv,
    settings.json, history.jsonl of the search for the mode, restart/, and data.csv if patients are
    simulated. The draws and the sampler's state are saved in restart/ every few seconds. When asked
    to stop (SIGTERM, SIGINT, SIGUSR1, or the launcher's Ctrl-C), it finishes its iteration or draw
    and writes everything. With `settings.resume` it continues bit for bit.

    Parameters
    ----------
    settings
        The options of `mpigrad run population`.
    comm
        The ranks that take part; by default all ranks.

    Raises
    ------
    ValueError, OSError
        On every rank, before any work, if the settings, the patients' table or the output directory
        are not valid.
    mpigrad.optimize.NotFiniteError
        On every rank, if the density is not finite at the medians of the prior.
    """
    comm = resolve(comm)
    call_on_root(comm, settings.check)
    with jax.enable_x64(True):
        model = Model(Kinetics(settings.stiff, settings.rtol), _prior(settings))
        cohort, truth = call_on_root(comm, lambda: _patients(settings, model))
        prepare_output(settings, settings.out, comm)
        with raise_on_all_ranks(comm):
            if comm.rank == 0:
                if not settings.resume:
                    remove_saves(settings.out / "restart")
                print(
                    f"population: {len(cohort.names)} patients, {cohort.measurements} "
                    f"concentrations, on {comm.size} rank{'s' * (comm.size > 1)}",
                    flush=True,
                )
                if truth is not None:
                    records.write_patients(settings.out / "data.csv", cohort)
        with checkpoint.listen():
            return _estimate(settings, model, cohort, truth, comm)


def _prior(settings: Settings) -> Prior:
    if settings.flip_flop:
        return Prior(settings.typical, fast=0.0)
    absorption, decay = settings.typical[0], float(decay_rate(settings.typical))
    if not absorption > decay:  # NaN, too
        raise ValueError(
            f"--typical: expected an absorption faster than the decay in the blood, {decay:.3g} "
            f"per hour, got {absorption:g} per hour. If the drug is like that, add --flip-flop."
        )
    return Prior(settings.typical)


def _patients(settings: Settings, model: Model) -> tuple[Cohort, Truth | None]:
    if settings.data is not None:
        return records.read_patients(settings.data), None
    return simulate(settings.patients, settings.seed, model.kinetics)


def _estimate(
    settings: Settings, model: Model, cohort: Cohort, truth: Truth | None, comm: Communicator
) -> PopulationResult:
    with jobs.pool(comm, throw=False) as pool:
        data = put_patients(pool, cohort)
        density = log_density(model, pool.sum(model.log_likelihood, data))
        start = model.prior.start(len(cohort.records))
        posterior = None
        if comm.rank == 0:
            print("population: the mode of the posterior", flush=True)
        with contextlib.ExitStack() as compiling:
            compiling.enter_context(hold_grace_time(comm))
            mode = optimize.minimize(
                lambda unknowns: -density(unknowns),
                start,
                optimize.LBFGS(memory=20),
                replicated=True,
                loss="replicated",
                max_steps=settings.iterations,
                rtol=1e-4,
                callback=lambda record, unknowns: compiling.close(),
                checkpoint=_checkpoint(settings, cohort, "mode"),
                history=settings.out / "history.jsonl",
                progress=True,
                comm=comm,
            )
        if settings.draws and not mode.stats["interrupted"]:
            posterior = _sample(settings, model, density, mode.value, cohort, comm)
        with hold_grace_time(comm):
            return _report(settings, model, cohort, truth, mode, posterior, pool, data)


def _report(
    settings: Settings,
    model: Model,
    cohort: Cohort,
    truth: Truth | None,
    mode: optimize.Solution,
    posterior: Posterior | None,
    pool: jobs.Pool,
    data: jobs.Data,
) -> PopulationResult:
    """Write what there is: the draws first, because the predictions take a while."""
    comm, summary = pool.comm, {}
    if posterior is None:
        draws = jax.tree.map(lambda leaf: np.asarray(leaf)[None], mode.value)
    else:
        with raise_on_all_ranks(comm):
            if comm.rank == 0:
                write_draws(settings.out, posterior)
        summary = summarize(posterior.unknowns.shared)
        draws = _some(posterior.unknowns)
    curves = pool.map(functools.partial(predict_patient, model), data)
    fits = _each(curves(draws.shared, jnp.swapaxes(draws.effects, 0, 1)), cohort)
    estimates = Estimates(cohort, truth, mode, draws, posterior, summary, fits)
    path = settings.out / "report.html"
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            path = write_outputs(settings, model, estimates, comm.size)
            if warning := disagreement(summary):
                print(f"population: {warning}", flush=True)
            print(f"report: {path}", flush=True)
    return PopulationResult(settings, cohort, truth, mode.value, posterior, summary, path)


def _checkpoint(settings: Settings, cohort: Cohort, name: str) -> checkpoint.Checkpoint:
    """Return the checkpoint of a phase: every few seconds, because the saves are small."""
    digest = hashlib.sha256(repr(cohort.names).encode())
    for leaf in jax.tree.leaves(cohort.records):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    fingerprint = {**resume_settings(settings), "patients' table": digest.hexdigest()[:16]}
    return checkpoint.Checkpoint(
        settings.out / "restart" / name,
        minutes=_SAVE_EVERY,
        fingerprint=fingerprint,
        resume=True,
    )


def put_patients(pool: jobs.Pool, cohort: Cohort) -> jobs.Data:
    """Put the patients into a pool as jobs: few large blocks, with equal work for each rank."""
    costs = [1.0 + len(known.doses) for known in cohort.records]  # integrations
    block = min(-(-len(costs) // _BLOCKS), _LARGEST_BLOCK)
    return pool.put(list(cohort.records), schedule=jobs.Weighted(costs), block=block)


def _sample(
    settings: Settings,
    model: Model,
    density: Density,
    mode: Unknowns,
    cohort: Cohort,
    comm: Communicator,
) -> Posterior | None:
    sampler = NUTS(settings.warmup, settings.draws, settings.acceptance, settings.depth)
    generator = np.random.default_rng(settings.seed)
    starts = jax.tree.map(
        lambda leaf: leaf + _JITTER * generator.normal(size=(settings.chains, *leaf.shape)), mode
    )
    if comm.rank == 0:
        print(
            f"population: {settings.warmup} iterations of warm-up and {settings.draws} draws of "
            f"{settings.chains} chains",
            flush=True,
        )
    progress = Progress(settings.warmup + settings.draws, comm.rank)
    compiling = contextlib.ExitStack()

    def note(iteration: int, figures: dict[str, float]) -> bool:
        compiling.close()
        progress.update(iteration, **figures)
        return False

    scales = model.prior.scales(len(mode.effects))
    with _checkpoint(settings, cohort, "draws").start(comm) as session, compiling:
        compiling.enter_context(hold_grace_time(comm))
        posterior = sampler.sample(density, starts, settings.seed, note, comm, scales, session)
    progress.close()
    return posterior


def _each(fits: Prediction | list[Prediction], cohort: Cohort) -> list[Prediction]:
    """Return one fit for each patient. A pool returns fits of one shape as one stack."""
    if not isinstance(fits, list):
        return [jax.tree.map(lambda x, i=i: x[i], fits) for i in range(len(cohort.names))]
    return fits


def _some(unknowns: Unknowns) -> Unknowns:
    """Return up to _DRAWN evenly spaced draws of all chains along one axis."""
    chains, draws = unknowns.shared.log_noise.shape
    kept = np.linspace(0, chains * draws - 1, min(_DRAWN, chains * draws)).astype(int)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[kept], unknowns)
